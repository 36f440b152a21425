"""The ``linear_regression`` recipe: workers that each hold a part of a data set fit one linear model."""

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

from trainwright.recipes.vision.bundled_data import diabetes


class LinearRegression(LightningModule):
    """Least squares by gradient descent on half the mean squared error.

    Logs ``train_loss``; ``test`` logs ``test_mse`` and, if the data module knows the closed-form solution,
    ``distance_to_closed_form``: the largest absolute difference of a coefficient or the intercept. Training ends with
    that too, printed and written to the loggers. ``predict`` returns the fitted values.

    The coefficients are read off the model's answers to unit vectors, so it does not matter which rank holds them.

    Args:
        features: number of input columns.
        optimizer: takes parameters, returns the optimizer; ``None``: gradient descent with learning rate 0.1 and
            momentum 0.9.
        variance_reduction: correct the gradient of each batch by what it lacks of that of all data, both at the
            parameters with which the epoch began (SVRG: Johnson and Zhang, NIPS 2013; with late gradients: Reddi et
            al., arXiv:1506.06840). In the closed-form solution every corrected gradient is 0, that of a part of the
            data too, so workers that step by themselves get there at a constant rate; without it they end beside it.
            Each worker reads all data once an epoch. The data module has to have ``whole()``.
    """

    def __init__(
        self,
        features: int = 10,
        optimizer: Callable[[Any], Optimizer] | None = None,
        variance_reduction: bool = False,
    ) -> None:
        super().__init__()
        self.features, self.variance_reduction = features, variance_reduction
        self._anchor: _Anchor | None = None
        self.optimizer_factory = optimizer or partial(SGD, lr=0.1, momentum=0.9)
        self.linear = nn.Linear(features, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """``(B, features)`` to ``(B, 1)``."""
        outputs: Tensor = self.linear(inputs)
        return outputs

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Half the mean squared error; with variance reduction plus a term that is linear in the parameters."""
        if not self.variance_reduction:
            loss = self._mean_squared_error(batch) / 2
            self.log("train_loss", loss)
            return loss
        if self._anchor is None:  # a run that goes on within an epoch
            self._set_anchor()
        assert self._anchor is not None
        inputs, targets = batch
        slopes, offset = self._anchor.correction(inputs, targets)
        # By the model's answers, so that it does not matter which rank holds the parameters.
        probes = torch.stack((slopes, torch.zeros_like(slopes))).to(inputs)
        answers = self(torch.cat((inputs, probes)))
        loss = F.mse_loss(answers[:-2], targets) / 2
        self.log("train_loss", loss)
        corrected: Tensor = loss + answers[-2, 0] + (offset - 1) * answers[-1, 0]
        return corrected

    def on_train_epoch_start(self) -> None:
        """With variance reduction: remember the parameters and the gradient of all data."""
        if self.variance_reduction:
            self._set_anchor()

    def _set_anchor(self) -> None:
        self._anchor = _Anchor(*self.coefficients(), *self._whole_data())

    def _whole_data(self) -> tuple[Tensor, Tensor]:
        whole = getattr(getattr(self.trainer, "datamodule", None), "whole", None)
        if whole is None:
            raise ValueError(
                "LinearRegression(variance_reduction=True) needs a data module with a method whole(), which gives "
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
        """Fitted values ``(B, 1)``; targets in the batch are not looked at."""
        outputs: Tensor = self(batch[0])
        return outputs

    def on_train_end(self) -> None:
        """Print and log how far from the closed form the training ended."""
        distance = self.distance_to_closed_form()
        if distance is None:
            return
        self.print(f"Largest distance of a coefficient to the closed-form solution: {distance:.2e}")
        for logger in self.loggers:
            logger.log_metrics({"distance_to_closed_form": distance}, max(0, self.global_step - 1))

    def configure_optimizers(self) -> Optimizer:
        """The optimizer of all parameters."""
        return self.optimizer_factory(self.parameters())

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """Coefficients ``(features,)`` and intercept ``()`` on the CPU; every rank has to call this."""
        probes = torch.cat((torch.zeros(1, self.features), torch.eye(self.features))).to(self.device)
        with torch.no_grad():
            # Through the strategy, which alone knows how to bring a sharded model's weights together.
            answers: Tensor = self.trainer.strategy.predict_step((probes,), 0)
        answers = answers.flatten().float().cpu()
        return answers[1:] - answers[0], answers[0]

    def distance_to_closed_form(self) -> float | None:
        """Largest absolute difference to the data module's ``closed_form()``; ``None`` if it has none."""
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
    """Parameters of a moment, and the gradient of all data there.

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
        """What these data lack of the gradient of all, by coefficients ``(features,)`` and intercept ``()``."""
        own = self._gradient(inputs, targets)
        return self._whole[0] - own[0], (self._whole[1] - own[1]).to(targets)

    def _gradient(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # On the CPU, where the coefficients are: they are ten numbers.
        inputs, targets = inputs.double().cpu(), targets.double().cpu()
        residuals = inputs @ self._slopes + self._intercept - targets[:, 0]
        return inputs.T @ residuals / len(inputs), residuals.mean()


class DiabetesData(LightningDataModule):
    """scikit-learn's diabetes data, standardised: 442 patients, ten measurements, one target.

    Order is kept, so with ``batch_size`` large enough every optimizer step sees all patients, dealt to the data ranks
    in disjoint parts that differ by one patient at most: of ten ranks, eight get 44 and two get 45.

    Args:
        batch_size: patients per micro-batch; with n ranks, 442 / n or more make one step of each pass.
        passes: how often an epoch of training goes through all patients.
        decorrelate: turn the measurements into their principal components, each of variance 1. The fitted values are
            the same, and the curvature is 1 in every direction, where that of the measurements is 470 times larger in
            one than in another: only momentum is fast there, and momentum is what late gradients forbid.

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
        """Inputs ``(442, 10)`` and targets ``(442, 1)`` in float64."""
        inputs, targets = diabetes()
        return (_principal_components(inputs) if self.decorrelate else inputs), targets

    def train_dataloader(self) -> DataLoader[Any]:
        """All patients, ``passes`` times."""
        assert self._data is not None, "setup has not run"
        return DataLoader(ConcatDataset([self._data] * self.passes), self.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """All patients: the question is whether the fit is the least-squares fit of these data."""
        return self._loader()

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """All patients."""
        return self._loader()

    def closed_form(self) -> tuple[Tensor, Tensor]:
        """The least-squares solution in float64: coefficients ``(features,)`` and intercept ``()``."""
        inputs, targets = self.whole()
        with_ones = torch.cat((inputs, torch.ones(len(inputs), 1, dtype=inputs.dtype)), dim=1)
        solution = torch.linalg.lstsq(with_ones, targets).solution.flatten()
        return solution[:-1], solution[-1]

    def _loader(self) -> DataLoader[tuple[Tensor, ...]]:
        assert self._data is not None, "setup has not run"
        return DataLoader(self._data, self.batch_size)


def _principal_components(columns: Tensor) -> Tensor:
    """Of standardised columns ``(N, features)``, each of variance 1."""
    rotated, _, _ = torch.linalg.svd(columns, full_matrices=False)
    # The sign of a component is the solver's choice; ranks on unequal machines must choose the same.
    largest = rotated.gather(0, rotated.abs().argmax(dim=0, keepdim=True))
    components: Tensor = rotated * largest.sign() * math.sqrt(len(columns))
    return components
