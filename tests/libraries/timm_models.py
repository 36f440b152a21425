"""timm and torchmetrics: networks of one with collections and trackers of the other in a LightningModule."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import timm
import timm.optim
import torch
import torch.nn.functional as F
import torchmetrics
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

from tests.libraries.base import order, rows_of

SAMPLES, SIZE, CLASSES = 24, 32, 4


def metrics(prefix: str) -> torchmetrics.MetricCollection:
    kinds = (MulticlassAccuracy, MulticlassF1Score, MulticlassAUROC)
    return torchmetrics.MetricCollection([kind(num_classes=CLASSES) for kind in kinds], prefix=prefix)


class Classifies(pl.LightningModule):
    """Pictures, with metrics of both stages, an average of the weights, and a schedule of timm by epochs."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = timm.create_model(name, num_classes=CLASSES, **options)
        self.train_metrics, self.val_metrics = metrics("train_"), metrics("val_")
        self.confusion = MulticlassConfusionMatrix(num_classes=CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_metrics.update(logits, y)
        self.log("train_loss", loss)
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_metrics.update(logits, y)
        self.confusion.update(logits, y)
        self.log_dict(self.val_metrics)

    def on_validation_epoch_end(self) -> None:
        self.log("val_diagonal", self.confusion.compute().diagonal().float().mean())
        self.confusion.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).softmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = timm.optim.create_optimizer_v2(self.net, opt="adamw", lr=1e-3, weight_decay=0.05, eps=1e-4)
        return [optimizer], [{"scheduler": CosineLRScheduler(optimizer, t_initial=10), "interval": "epoch"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch)


class Tracked(Classifies):
    """Also follows the best epoch (``MetricTracker``)."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        super().__init__(name, options)
        self.tracker = torchmetrics.MetricTracker(MulticlassAccuracy(num_classes=CLASSES), maximize=True)

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        x, y = batch
        self.tracker.update(self(x), y)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("val_best", self.tracker.best_metric())


class Averaged(Classifies):
    """Also keeps timm's moving average of the weights, and validates that."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        super().__init__(name, options)
        self.average = ModelEmaV3(self.net, decay=0.5)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.update(self.net)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.average(x)
        self.confusion.update(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y))


def loader(batch: int, shuffled: bool) -> DataLoader:
    generator = torch.Generator().manual_seed(11)
    labels = torch.arange(SAMPLES) % CLASSES
    images = torch.randn(SAMPLES, 3, SIZE, SIZE, generator=generator) + labels.view(-1, 1, 1, 1) / 4
    data = TensorDataset(images, labels)
    return DataLoader(data, batch_size=batch, sampler=order(data, shuffled))


def network(kind: type[Classifies], name: str, **options: Any) -> Classifies:
    return kind(name, options)


SMALL = {"img_size": SIZE, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4}
vit = "vit_tiny_patch16_224"
ROWS = [
    *rows_of("vit, MetricCollection", partial(network, Classifies, vit, **SMALL), loader),
    *rows_of("vit, MetricTracker", partial(network, Tracked, vit, **SMALL), loader),
    # The averaged weights aren't frozen.
    *rows_of(
        "vit, ModelEmaV3",
        partial(network, Averaged, vit, **SMALL),
        loader,
        options={"ddp": {"find_unused_parameters": True}},
    ),
    *rows_of(
        "convnext_atto",
        partial(network, Classifies, "convnext_atto", depths=(2, 2, 2, 2), dims=(8, 16, 16, 32)),
        loader,
    ),
    *rows_of("resnet10t", partial(network, Classifies, "resnet10t"), loader, batch_norm=True),
]
