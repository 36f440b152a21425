"""segmentation-models-pytorch: networks, losses and metrics in a LightningModule, as in its examples."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import segmentation_models_pytorch as smp
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.libraries.base import order, rows_of

SAMPLES, SIZE = 24, 64


class Segments(pl.LightningModule):
    """A binary mask, by the Dice loss; the intersection over union is computed at the end of an epoch."""

    def __init__(self, network: str, encoder: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = smp.create_model(network, encoder_name=encoder, encoder_weights=None, classes=1, **options)
        self.loss_fn = smp.losses.SoftBCEWithLogitsLoss()
        self.outputs: list[dict[str, Tensor]] = []

    def forward(self, image: Tensor) -> Any:
        return self.model(image)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        image, mask = batch
        loss: Tensor = self.loss_fn(self(image), mask)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        image, mask = batch
        logits = self(image)
        counts = smp.metrics.get_stats((logits.sigmoid() > 0.5).long(), mask.long(), mode="binary")
        self.outputs.append(dict(zip(("tp", "fp", "fn", "tn"), counts, strict=True)))
        self.log("val_loss", self.loss_fn(logits, mask))

    def on_validation_epoch_end(self) -> None:
        counts = [torch.cat([each[key] for each in self.outputs]) for key in ("tp", "fp", "fn", "tn")]
        self.log("val_iou", smp.metrics.iou_score(*counts, reduction="micro"))
        self.outputs.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


def loader(batch: int, shuffled: bool) -> DataLoader:
    generator = torch.Generator().manual_seed(11)
    images = torch.randn(SAMPLES, 3, SIZE, SIZE, generator=generator)
    data = TensorDataset(images, (images[:, :1] > 0).float())
    return DataLoader(data, batch_size=batch, sampler=order(data, shuffled))


def network(kind: str, encoder: str, **options: Any) -> Segments:
    return Segments(kind, encoder, options)


# In fp32, statistics of a few values per channel turn the order of a sum into 5e-4 within three steps.
exactly = partial(dict, precision="64-true")
no_norm = {"decoder_use_norm": False}
ROWS = [
    *rows_of("Unet, resnet18", partial(network, "unet", "resnet18"), loader, batch_norm=True, trainer=exactly),
    *rows_of("Unet, mit_b0", partial(network, "unet", "mit_b0", **no_norm), loader, trainer=exactly),
    *rows_of("FPN, mit_b0", partial(network, "fpn", "mit_b0", decoder_dropout=0.0), loader),
    *rows_of(
        "DeepLabV3Plus, resnet18",
        partial(network, "deeplabv3plus", "resnet18", decoder_aspp_dropout=0.0),
        loader,
        batch_norm=True,
        trainer=exactly,
    ),
]
