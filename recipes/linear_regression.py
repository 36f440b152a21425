"""The ``linear_regression`` recipe: workers that each hold a part of a data set fit one linear model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from trainwright.recipes.bundled_data import diabetes


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
    """

    def __init__(self, features: int = 10, optimizer: Callable[[Any], Optimizer] | None = None) -> None:
        super().__init__()
        self.features = features
        self.optimizer_factory = optimizer or partial(SGD, lr=0.1, momentum=0.9)
        self.linear = nn.Linear(features, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """``(B, features)`` to ``(B, 1)``."""
        outputs: Tensor = self.linear(inputs)
        return outputs

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Half the mean squared error."""
        loss = self._mean_squared_error(batch) / 2
        self.log("train_loss", loss)
        return loss

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


class DiabetesData(LightningDataModule):
    """scikit-learn's diabetes data, standardised: 442 patients, ten measurements, one target.

    Order is kept, so with ``batch_size`` large enough every optimizer step sees all patients, dealt to the data ranks
    in disjoint parts that differ by one patient at most: of ten ranks, eight get 44 and two get 45.

    Args:
        batch_size: patients per micro-batch; with n ranks, 442 / n or more make one step of an epoch.

    Raises:
        ImportError: (in ``setup``) if scikit-learn is missing.
    """

    def __init__(self, batch_size: int = 45) -> None:
        super().__init__()
        self.batch_size = batch_size
        self._data: TensorDataset | None = None

    def setup(self, stage: str) -> None:
        """Load the data."""
        inputs, targets = diabetes()
        self._data = TensorDataset(inputs.float(), targets.float())

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """All patients."""
        return self._loader()

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """All patients: the question is whether the fit is the least-squares fit of these data."""
        return self._loader()

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """All patients."""
        return self._loader()

    def closed_form(self) -> tuple[Tensor, Tensor]:
        """The least-squares solution in float64: coefficients ``(features,)`` and intercept ``()``."""
        inputs, targets = diabetes()
        with_ones = torch.cat((inputs, torch.ones(len(inputs), 1, dtype=inputs.dtype)), dim=1)
        solution = torch.linalg.lstsq(with_ones, targets).solution.flatten()
        return solution[:-1], solution[-1]

    def _loader(self) -> DataLoader[tuple[Tensor, ...]]:
        assert self._data is not None, "setup has not run"
        return DataLoader(self._data, self.batch_size)
