"""monai: its networks, losses, metrics and inferers in modules as in its tutorials, on its ``MetaTensor`` batches."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from monai.data import DataLoader, Dataset
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet, ViTAutoEnc
from monai.transforms import EnsureTyped
from torch import Tensor

from tests.libraries.base import order, rows_of

SAMPLES, SIZE, CLASSES = 24, 16, 2


@cache
def scans() -> Dataset:
    """Noise with a brighter square, and where that is."""
    random = np.random.default_rng(0)
    found = []
    for number in range(SAMPLES):
        image, label = random.normal(size=(1, SIZE, SIZE)).astype(np.float32), np.zeros((1, SIZE, SIZE), np.int64)
        label[:, number % 8 : number % 8 + 6, 4:10] = 1
        found.append({"image": image + 2 * label.astype(np.float32), "label": label})
    return Dataset(found, EnsureTyped(("image", "label"), track_meta=True))


def loader(batch: int, shuffled: bool) -> DataLoader:
    return DataLoader(scans(), batch_size=batch, sampler=order(scans(), shuffled))


class Segmenter(pl.LightningModule):
    """Finds the square; validates in windows that are smaller than a scan, with the library's own metric."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet(
            spatial_dims=2, in_channels=1, out_channels=CLASSES, channels=(8, 16, 32), strides=(2, 2), num_res_units=1
        )
        self.loss = DiceCELoss(to_onehot_y=True, softmax=True)
        self.metric = DiceMetric(include_background=False, num_classes=CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self(batch["image"]), batch["label"])
        self.log("train_loss", loss, batch_size=len(batch["image"]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        made = sliding_window_inference(batch["image"], (12, 12), 4, self)
        self.log("val_loss", self.loss(made, batch["label"]), batch_size=len(batch["image"]))
        self.metric(made.argmax(dim=1, keepdim=True), batch["label"])

    def on_validation_epoch_end(self) -> None:
        self.log("val_dice", self.metric.aggregate().mean())
        self.metric.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch["image"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Restorer(pl.LightningModule):
    """Restores scans of which a part is hidden, with a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ViTAutoEnc(
            in_channels=1,
            img_size=(SIZE, SIZE),
            patch_size=(4, 4),
            hidden_size=32,
            mlp_dim=64,
            num_layers=4,
            num_heads=4,
            deconv_chns=8,
            spatial_dims=2,
        )

    def forward(self, x: Tensor) -> Any:
        return self.net(x)[0]

    def _loss(self, batch: Any) -> Tensor:
        hidden = batch["image"].clone()
        hidden[..., :4, :] = 0
        return F.mse_loss(self(hidden), batch["image"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, batch_size=len(batch["image"]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), batch_size=len(batch["image"]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch["image"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


built = partial(rows_of, make_loader=loader)
ROWS = [
    *built("UNet, DiceMetric", Segmenter),
    # Its blocks have a norm for cross-attention, which it does not use.
    *built("ViTAutoEnc", Restorer, options={"ddp": {"find_unused_parameters": True}}),
]
