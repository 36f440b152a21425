"""The ``digits`` recipe: a small convolutional network on scikit-learn's handwritten digits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from trainwright.recipes.muon import build_optimizer
from trainwright.recipes.vision.bundled_data import digits

SPLIT_SEED = 0
"""Seed of the split, independent of the run's seed: every run is evaluated on the same images."""


class ResidualBlock(nn.Module):
    """``x + conv(silu(norm(x)))`` of equal shape.

    GroupNorm instead of BatchNorm: its result does not depend on the division of a batch among ranks.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.conv = nn.Conv2d(channels, channels, kernel_size=3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, C, 8, 8)`` to the same shape."""
        out: Tensor = x + self.conv(F.silu(self.norm(x)))
        return out


class DigitsModule(LightningModule):
    """Classifier of 8 x 8 images.

    Logs ``train_loss``, and over all images of a split ``val_loss``, ``val_acc``, ``test_loss``, ``test_acc``
    (accuracy, 0 to 1). ``predict`` returns the class of each image.

    Args:
        channels: width of the network, a multiple of 4.
        blocks: residual blocks.
        optimizer: takes parameters, returns the optimizer; ``None``: AdamW with learning rate 3e-3.
    """

    def __init__(
        self, channels: int = 32, blocks: int = 3, optimizer: Callable[[Any], Optimizer] | None = None
    ) -> None:
        super().__init__()
        if channels < 4 or channels % 4:
            raise ValueError(f"module.channels={channels} (allowed: a multiple of 4). Give for example 32.")
        self.optimizer_factory = optimizer or partial(AdamW, lr=3e-3)
        self.stem = nn.Conv2d(1, channels, kernel_size=3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(channels) for _ in range(blocks))
        self.norm = nn.GroupNorm(4, channels)
        self.head = nn.Linear(channels * 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``(B, 1, 8, 8)`` to logits ``(B, 10)``."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        x = F.max_pool2d(F.silu(self.norm(x)), 2)
        logits: Tensor = self.head(x.flatten(1))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy."""
        images, classes = batch
        loss = F.cross_entropy(self(images), classes)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_acc``."""
        self._log_held_out("val", *batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``test_loss`` and ``test_acc``."""
        self._log_held_out("test", *batch)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the most likely class of each image, int64 ``(B,)``."""
        logits: Tensor = self(batch[0])
        return logits.argmax(dim=1)

    def configure_optimizers(self) -> Optimizer:
        """Return the optimizer of all parameters."""
        return build_optimizer(self, self.optimizer_factory, [{"params": list(self.parameters())}])

    def _log_held_out(self, stage: str, images: Tensor, classes: Tensor) -> None:
        logits = self(images)
        shared: dict[str, Any] = {"batch_size": len(images), "sync_dist": True}
        self.log(f"{stage}_loss", F.cross_entropy(logits, classes), **shared)
        self.log(f"{stage}_acc", (logits.argmax(dim=1) == classes).float().mean(), prog_bar=True, **shared)


class DigitsData(LightningDataModule):
    """1,797 images: 1,257 to train, 180 to validate, 360 to test, the same in every run.

    Args:
        batch_size: images per micro-batch.

    Raises:
        ImportError: (in ``setup``) if scikit-learn is missing.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.splits: dict[str, TensorDataset] = {}

    def setup(self, stage: str) -> None:
        """Load and split the images."""
        if self.splits:
            return
        images, classes = digits()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
        for name, indices in zip(("test", "val", "train"), order.split([360, 180, 1257]), strict=True):
            self.splits[name] = TensorDataset(images[indices], classes[indices])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return training images, shuffled."""
        return DataLoader(self.splits["train"], self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return validation images."""
        return DataLoader(self.splits["val"], self.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return test images."""
        return DataLoader(self.splits["test"], self.batch_size)

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return test images."""
        return DataLoader(self.splits["test"], self.batch_size)
