"""lightly: the classifiers that it defines, and self-supervised modules made of its parts as in its examples."""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any

import tests.libraries.alias  # noqa: F401  # isort: skip

import pytorch_lightning as pl
import torch
from lightly.loss import DINOLoss, NegativeCosineSimilarity, NTXentLoss
from lightly.models.modules import (
    BYOLPredictionHead,
    BYOLProjectionHead,
    DINOProjectionHead,
    MoCoProjectionHead,
    SimSiamPredictionHead,
    SimSiamProjectionHead,
)
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.benchmarking import LinearClassifier
from lightly.utils.benchmarking.linear_classifier import FinetuneClassifier
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.libraries.base import order, rows_of

SAMPLES, CLASSES, FEATURES, BATCH = 24, 4, 32, 8


class Views(Dataset):
    """Two views of a picture, its class and its file, as lightly's data sets give them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.pictures = torch.randn(SAMPLES, 2, 3, 8, 8, generator=generator)
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return list(self.pictures[index]), self.labels[index], f"{index}.png"


class Labelled(Views):
    """The first view and the class."""

    def __getitem__(self, index: int) -> Any:
        return self.pictures[index, 0], self.labels[index]


def loader(samples: type[Views], batch: int, shuffled: bool) -> DataLoader:
    data = samples()
    return DataLoader(data, batch_size=batch, sampler=order(data, shuffled))


def backbone() -> nn.Module:
    """A small network without batch statistics."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, FEATURES, 3, stride=2, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


class SelfSupervised(pl.LightningModule):
    """A backbone whose features of two views are compared; ``loss(x0, x1)`` is a subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = backbone()

    def forward(self, x: Tensor) -> Any:
        return self.backbone(x)

    def loss(self, x0: Tensor, x1: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x0, x1), _, _ = batch
        loss = self.loss(x0, x1)
        self.log("train_loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0][0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.06, momentum=0.9)


class Byol(SelfSupervised):
    """Predicts what a momentum encoder sees; the encoder is updated before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.projection_head = BYOLProjectionHead(FEATURES, 64, 16)
        self.prediction_head = BYOLPredictionHead(16, 64, 16)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NegativeCosineSimilarity()

    def loss(self, x0: Tensor, x1: Tensor) -> Tensor:
        update_momentum(self.backbone, self.backbone_momentum, m=0.9)
        update_momentum(self.projection_head, self.projection_head_momentum, m=0.9)
        p0, p1 = (self.prediction_head(self.projection_head(self.backbone(x))) for x in (x0, x1))
        with torch.no_grad():
            z0, z1 = (self.projection_head_momentum(self.backbone_momentum(x)) for x in (x0, x1))
        return 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))


class SimSiam(SelfSupervised):
    """Predicts the other view's projection, without a second encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.projection_head = SimSiamProjectionHead(FEATURES, 64, 16)
        self.prediction_head = SimSiamPredictionHead(16, 8, 16)
        self.criterion = NegativeCosineSimilarity()

    def loss(self, x0: Tensor, x1: Tensor) -> Tensor:
        z0, z1 = (self.projection_head(self.backbone(x)) for x in (x0, x1))
        p0, p1 = self.prediction_head(z0), self.prediction_head(z1)
        return 0.5 * (self.criterion(z0.detach(), p1) + self.criterion(z1.detach(), p0))


class Moco(SelfSupervised):
    """Contrasts views with those of a momentum encoder in a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.projection_head = MoCoProjectionHead(FEATURES, 32, 16)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NTXentLoss(memory_bank_size=(16, 16), gather_distributed=True)

    def loss(self, x0: Tensor, x1: Tensor) -> Tensor:
        update_momentum(self.backbone, self.backbone_momentum, m=0.9)
        update_momentum(self.projection_head, self.projection_head_momentum, m=0.9)
        query = self.projection_head(self.backbone(x0))
        with torch.no_grad():
            key = self.projection_head_momentum(self.backbone_momentum(x1))
        return self.criterion(query, key)


class Dino(SelfSupervised):
    """Distills a momentum teacher, whose last layer's gradients are dropped in the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.student_head = DINOProjectionHead(FEATURES, 32, 16, 24, freeze_last_layer=1)
        self.teacher_backbone = copy.deepcopy(self.backbone)
        self.teacher_head = DINOProjectionHead(FEATURES, 32, 16, 24)
        deactivate_requires_grad(self.teacher_backbone)
        deactivate_requires_grad(self.teacher_head)
        self.criterion = DINOLoss(output_dim=24, warmup_teacher_temp_epochs=5)

    def loss(self, x0: Tensor, x1: Tensor) -> Tensor:
        update_momentum(self.backbone, self.teacher_backbone, m=0.9)
        update_momentum(self.student_head, self.teacher_head, m=0.9)
        with torch.no_grad():
            teacher = [self.teacher_head(self.teacher_backbone(x)) for x in (x0, x1)]
        student = [self.student_head(self.backbone(x)) for x in (x0, x1)]
        return self.criterion(teacher, student, epoch=self.current_epoch)

    def on_after_backward(self) -> None:
        self.student_head.cancel_last_layer_gradients(current_epoch=self.current_epoch)


def classifier(kind: type) -> Any:
    """A classifier of lightly, whose learning rate is a multiple of the global batch."""
    per_device = BATCH // int(os.environ.get("WORLD_SIZE", 1))
    return kind(backbone(), per_device, lr=2.0, feature_dim=FEATURES, num_classes=CLASSES, topk=(1, 2))


views = partial(rows_of, make_loader=partial(loader, Views), validates=False, package="pytorch_lightning")
# Features are computed without gradients.
UNUSED = {"ddp": {"find_unused_parameters": True}}
labelled = partial(
    rows_of,
    make_loader=partial(loader, Labelled),
    predicts=False,
    loads=lambda: {"model": backbone()},
    package="pytorch_lightning",
)
ROWS = [
    *labelled("LinearClassifier", partial(classifier, LinearClassifier), options=UNUSED),
    *labelled("FinetuneClassifier", partial(classifier, FinetuneClassifier)),
    *views("BYOL", Byol, batch_norm=True),
    *views("SimSiam", SimSiam, batch_norm=True),
    *views("MoCo", Moco),
    *views("DINO", Dino),
]
