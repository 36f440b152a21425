"""The ``linear_regression`` recipe: one linear model fitted by workers with parts of a data set."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from trainwright.recipes.muon import build_optimizer
from trainwright.recipes.vision.bundled_data import diabetes


class LinearRegression(LightningModule):
    """Least squares by gradient descent on half the mean squared error.

    Logs ``train_loss``; ``test`` logs ``test_mse`` and, if the data module knows the closed-form solution,
    ``distance_to_closed_form``: the largest absolute difference of a coefficient or the intercept. When training ends
    it is printed and logged too. ``predict`` returns the fitted values.

    Coefficients are computed from the model's outputs for unit vectors, so it does not matter which rank holds them.

    Args:
        features: number of input columns.
        optimizer: takes parameters, returns the optimizer; ``None``: gradient descent with learning rate 0.1 and
            momentum 0.9.
        variance_reduction: correct the gradient of each batch by its difference to that of all data, both at the
            parameters at the begin of the epoch (SVRG: Johnson and Zhang, NIPS 2013; asynchronous: Reddi et al.,
            arXiv:1506.06840). At the closed-form solution every corrected gradient is 0, so asynchronous workers
            converge to it at a constant rate instead of ending beside it. Each worker reads all data once per epoch.
            The data module must have ``whole()``.
    """

    def __init__(
        self, features: int = 10, optimizer: Callable[[Any], Optimizer] | None = None, variance_reduction: bool = False
    ) -> None:
        super().__init__()
        self.features, self.variance_reduction = features, variance_reduction
        self._anchor: _Anchor | None = None
        self.optimizer_factory = optimizer or partial(SGD, lr=0.1, momentum=0.9)
        self.linear = nn.Linear(features, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``(B, features)`` to ``(B, 1)``."""
        outputs: Tensor = self.linear(inputs)
        return outputs

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return half the mean squared error; with variance reduction plus a term linear in the parameters."""
        if not self.variance_reduction:
            loss = self._mean_squared_error(batch) / 2
            self.log("train_loss", loss)
            return loss
        if self._anchor is None:  # resumed in mid-epoch
            self._set_anchor()
        assert self._anchor is not None
        inputs, targets = batch
        slopes, offset = self._anchor.correction(inputs, targets)
        # Computed from outputs, so it does not matter which rank holds the parameters.
        probes = torch.stack((slopes, torch.zeros_like(slopes))).to(inputs)
        outputs = self(torch.cat((inputs, probes)))
        loss = F.mse_loss(outputs[:-2], targets) / 2
        self.log("train_loss", loss)
        corrected: Tensor = loss + outputs[-2, 0] + (offset - 1) * outputs[-1, 0]
        return corrected

    def on_train_epoch_start(self) -> None:
        """With variance reduction, store the parameters and the gradient of all data."""
        if self.variance_reduction:
            self._set_anchor()

    def _set_anchor(self) -> None:
        self._anchor = _Anchor(*self.coefficients(), *self._whole_data())

    def _whole_data(self) -> tuple[Tensor, Tensor]:
        whole = getattr(getattr(self.trainer, "datamodule", None), "whole", None)
        if whole is None:
            raise ValueError(
                "LinearRegression(variance_reduction=True) needs a data module with a method whole(), which returns "
                "inputs (N, features) and targets (N, 1) of all training data. Add it, or leave variance_reduction out."
            )
        inputs, targets = whole()
        return inputs, targets

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``test_mse``."""
        self.log("test_mse", self._mean_squared_error(batch), batch_size=len(batch[0]), sync_dist=True)

    def on_test_epoch_end(self) -> None:
        """Log ``distance_to_closed_form``."""
        distance = self.distance_to_closed_form()
        if distance is not None:
            self.log("distance_to_closed_form", distance, rank_zero_only=False)

    def predict_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Return fitted values ``(B, 1)``; targets in the batch are ignored."""
        outputs: Tensor = self(batch[0])
        return outputs

    def on_train_end(self) -> None:
        """Print and log the distance to the closed-form solution."""
        distance = self.distance_to_closed_form()
        if distance is None:
            return
        self.print(f"Largest distance of a coefficient to the closed-form solution: {distance:.2e}")
        for logger in self.loggers:
            logger.log_metrics({"distance_to_closed_form": distance}, max(0, self.global_step - 1))

    def configure_optimizers(self) -> Optimizer:
        """Return the optimizer of all parameters."""
        return build_optimizer(self, self.optimizer_factory, [{"params": list(self.parameters())}])

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """Return coefficients ``(features,)`` and intercept ``()`` on the CPU. All ranks must call this."""
        probes = torch.cat((torch.zeros(1, self.features), torch.eye(self.features))).to(self.device)
        with torch.no_grad():
            # Through the strategy, which can run a sharded model.
            outputs: Tensor = self.trainer.strategy.predict_step((probes,), 0)
        outputs = outputs.flatten().float().cpu()
        return outputs[1:] - outputs[0], outputs[0]

    def distance_to_closed_form(self) -> float | None:
        """Return the largest absolute difference to the data module's ``closed_form()``; ``None`` if it has none."""
        closed_form = getattr(getattr(self.trainer, "datamodule", None), "closed_form", None)
        if closed_form is None:
            return None
        coefficients, intercept = self.coefficients()
        wanted, wanted_intercept = closed_form()
        differences = torch.cat((coefficients - wanted, (intercept - wanted_intercept).view(1)))
        return float(differences.abs().max())

    def _mean_squared_error(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(self(inputs), targets)


class _Anchor:
    """Parameters at the begin of an epoch, and the gradient of all data there.

    Args:
        slopes: coefficients ``(features,)``.
        intercept: ``()``.
        inputs: of all data, ``(N, features)``.
        targets: ``(N, 1)``.
    """

    def __init__(self, slopes: Tensor, intercept: Tensor, inputs: Tensor, targets: Tensor) -> None:
        self._slopes, self._intercept = slopes.double(), intercept.double()
        self._whole = self._gradient(inputs, targets)

    def correction(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of all data minus a batch's, for coefficients ``(features,)`` and intercept ``()``."""
        own = self._gradient(inputs, targets)
        return self._whole[0] - own[0], (self._whole[1] - own[1]).to(targets)

    def _gradient(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # On the CPU, like the ten coefficients.
        inputs, targets = inputs.double().cpu(), targets.double().cpu()
        residuals = inputs @ self._slopes + self._intercept - targets[:, 0]
        return inputs.T @ residuals / len(inputs), residuals.mean()


class DiabetesData(LightningDataModule):
    """scikit-learn's diabetes data, standardized: 442 patients, ten measurements, one target.

    Not shuffled, so with ``batch_size`` large enough every optimizer step reads all patients, in disjoint parts per
    data rank that differ by at most one patient: of ten ranks, eight get 44 and two get 45.

    Args:
        batch_size: patients per micro-batch; with n ranks, 442 / n or more make one step of each pass.
        passes: passes over all patients per training epoch.
        decorrelate: use principal components of variance 1. Fitted values are the same, and the curvature is 1 in every
            direction; that of the measurements differs by a factor of 470, which needs momentum to converge fast, and
            momentum is incompatible with stale gradients.

    Raises:
        ImportError: (in ``setup``) if scikit-learn is missing.
    """

    def __init__(self, batch_size: int = 45, passes: int = 1, decorrelate: bool = False) -> None:
        super().__init__()
        self.batch_size, self.passes, self.decorrelate = batch_size, passes, decorrelate
        self._data: TensorDataset | None = None

    def setup(self, stage: str) -> None:
        """Load the data."""
        inputs, targets = self.whole()
        self._data = TensorDataset(inputs.float(), targets.float())

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return inputs ``(442, 10)`` and targets ``(442, 1)`` in float64."""
        inputs, targets = diabetes()
        return (_principal_components(inputs) if self.decorrelate else inputs), targets

    def train_dataloader(self) -> DataLoader[Any]:
        """Return all patients, ``passes`` times."""
        assert self._data is not None, "setup has not run"
        return DataLoader(ConcatDataset([self._data] * self.passes), self.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return all patients: the fit is compared with the least-squares fit of the same data."""
        return self._loader()

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return all patients."""
        return self._loader()

    def closed_form(self) -> tuple[Tensor, Tensor]:
        """Return the least-squares solution in float64: coefficients ``(features,)`` and intercept ``()``."""
        inputs, targets = self.whole()
        with_ones = torch.cat((inputs, torch.ones(len(inputs), 1, dtype=inputs.dtype)), dim=1)
        solution = torch.linalg.lstsq(with_ones, targets).solution.flatten()
        return solution[:-1], solution[-1]

    def _loader(self) -> DataLoader[tuple[Tensor, ...]]:
        assert self._data is not None, "setup has not run"
        return DataLoader(self._data, self.batch_size)


def _principal_components(columns: Tensor) -> Tensor:
    """Return principal components of variance 1 of standardized columns ``(N, features)``."""
    rotated, _, _ = torch.linalg.svd(columns, full_matrices=False)
    # Normalize signs, which solvers on different machines may choose differently.
    largest = rotated.gather(0, rotated.abs().argmax(dim=0, keepdim=True))
    components: Tensor = rotated * largest.sign() * math.sqrt(len(columns))
    return components
