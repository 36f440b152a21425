"""torchgeo: its tasks of classification, regression and segmentation."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchgeo.trainers import ClassificationTask, RegressionTask, SemanticSegmentationTask

from tests.libraries.base import order, rows_of
from tests.libraries.damped import Damped

SAMPLES, BANDS, CLASSES = 24, 4, 3


class Scenes(Dataset):
    """Images of several bands with what a task predicts: ``label`` of a scene or ``mask`` of its pixels."""

    def __init__(self, key: str, size: int, classes: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.key = key
        self.images = torch.randn(SAMPLES, BANDS, size, size, generator=generator)
        shape = (SAMPLES,) if key == "label" else (SAMPLES, size, size)
        self.targets = (
            torch.randint(classes, shape, generator=generator) if classes else torch.randn(shape, generator=generator)
        )

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return {"image": self.images[index], self.key: self.targets[index]}


def loader(key: str, size: int, classes: int, batch: int, shuffled: bool) -> DataLoader:
    data = Scenes(key, size, classes)
    return DataLoader(data, batch_size=batch, sampler=order(data, shuffled))


class Classification(Damped, ClassificationTask):
    """Otherwise as it is."""


class Regression(Damped, RegressionTask):
    """Otherwise as it is."""


def task(kind: Any, **options: Any) -> Any:
    return kind(in_channels=BANDS, **options)


ROWS = [
    *rows_of(
        "ClassificationTask, test_vit",
        partial(task, Classification, model="test_vit", num_classes=CLASSES),
        partial(loader, "label", 160, CLASSES),
    ),
    *rows_of(
        "SemanticSegmentationTask, fcn",
        partial(task, SemanticSegmentationTask, model="fcn", num_classes=CLASSES, num_filters=8),
        partial(loader, "mask", 32, CLASSES),
    ),
    *rows_of(
        "RegressionTask, resnet10t",
        partial(task, Regression, model="resnet10t"),
        partial(loader, "label", 32, 0),
        batch_norm=True,
    ),
]
