"""Modules of fuzzed programs: a network with a loss, logged values and optimizers, and variants of these."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection


class Trained(pl.LightningModule):
    """A network that logs its loss per step and epoch, and values of validation.

    Args:
        network, loss: what is trained.
        optimizers: builds what ``configure_optimizers`` returns.
    """

    def __init__(self, network: nn.Module, loss: Callable[..., Tensor], optimizers: Callable[[Any], Any]) -> None:
        super().__init__()
        self.net, self.criterion, self.make_optimizers = network, loss, optimizers

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = batch.get("a", batch)
        loss = self.criterion(self, batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        batch = batch.get("a", batch)
        self.log("val_loss", self.criterion(self, batch))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.criterion(self, batch.get("a", batch)))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch.get("a", batch)["x"])

    def configure_optimizers(self) -> Any:
        return self.make_optimizers(self)


class Measured(Trained):
    """Logs values that are no means over samples."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        out = self(batch.get("a", batch)["x"])
        self.log("val_rms", out.square().mean().sqrt())
        self.log("val_max", out.max(), reduce_fx="max")
        self.log("val_sum", out.sum(), reduce_fx="sum")


class Metrics(Trained):
    """Logs metrics of torchmetrics, in training and in validation."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.train_mean, self.error = MeanMetric(), MeanSquaredError(squared=False)
        self.both = MetricCollection({"val_a": MeanMetric(), "val_b": MeanMetric()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.train_mean.update(batch.get("a", batch)["y"].clamp_min(0).double())
        self.log("train_mean", self.train_mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        out = self(batch.get("a", batch)["x"]).detach()
        self.error.update(out.flatten(), torch.zeros_like(out).flatten())
        self.both.update(out.flatten())
        self.log("val_error", self.error)
        self.log_dict(self.both)


class Rooted(Trained):
    """Trains parameters of its own: a 0-d temperature and a slope of the scores; and counts its steps in a buffer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.temperature, self.slope = nn.Parameter(torch.tensor(1.2)), nn.Parameter(torch.zeros(1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.net(x) * self.temperature
        # A bias of all scores would have no gradient but rounding, which Adam enlarges.
        return scores + self.slope * torch.arange(scores.shape[-1], device=scores.device)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.steps.fill_(self.global_step)


class Typed(Trained):
    """Has parameters of other dtypes: a float64 factor, and frozen integers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.factor = nn.Parameter(torch.full((4,), 1.1, dtype=torch.float64))
        self.shifts = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        return out * self.factor.mean().to(out.dtype) + 0.01 * self.shifts.sum().to(out.dtype)


class Tracking(Trained):
    """Keeps running statistics in buffers, which its loss uses."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("samples", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) * (1.0 + 0.1 * self.mean)
        self.mean.lerp_(loss.detach().to(self.mean.dtype), 0.3)
        self.samples += len(batch.get("a", batch)["id"])
        return loss


class Taught(Trained):
    """Learns from a teacher, the moving average of the network."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = batch.get("a", batch)
        with torch.no_grad():
            wanted = self.teacher(batch["x"])
        loss = self.criterion(self, batch) + 0.3 * (self(batch["x"]) - wanted).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for kept, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                kept.lerp_(new, 0.2)


class ByHand(Trained):
    """Steps its optimizers and schedulers by hand, with clipped gradients."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        found: Any = self.optimizers()
        optimizers = found if isinstance(found, list) else [found]
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            self.clip_gradients(optimizer, gradient_clip_val=0.4, gradient_clip_algorithm="norm")
            optimizer.step()
        schedulers: Any = self.lr_schedulers()
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers] if schedulers else []:
            if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step()
        return loss.detach()
