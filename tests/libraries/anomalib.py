"""anomalib: detectors that are trained by gradients, with backbones without downloaded weights, on its batches.

Their predictions are its batches too, which aren't compared; the validation metrics are.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from anomalib.data.dataclasses.torch import ImageBatch, ImageItem
from anomalib.metrics import AUROC, Evaluator
from anomalib.models import Fastflow, Ganomaly, ReverseDistillation
from anomalib.pre_processing import PreProcessor
from torch.utils.data import DataLoader
from torchvision.transforms.v2 import Compose, Normalize, Resize

from tests.libraries.base import order, rows_of

SAMPLES, SIZE = 24, 32


@cache
def images() -> list[ImageItem]:
    """Noise, in every fourth image with a bright square, which is an anomaly."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for number in range(SAMPLES):
        image, mask = torch.rand(3, SIZE, SIZE, generator=generator), torch.zeros(SIZE, SIZE, dtype=torch.bool)
        if is_anomaly := number % 4 == 3:
            mask[8:16, 8:16] = True
            image[:, mask] = 1.0
        found.append(ImageItem(image=image, gt_mask=mask, gt_label=torch.tensor(is_anomaly), image_path=__file__))
    return found


def loader(batch: int, shuffled: bool) -> DataLoader:
    data: Any = images()
    return DataLoader(data, batch, sampler=order(data, shuffled), collate_fn=ImageBatch.collate)


def pre_processor() -> PreProcessor:
    """Normalizes; a detector takes the size of images from the first transform."""
    return PreProcessor(transform=Compose([Resize((SIZE, SIZE)), Normalize([0.5] * 3, [0.25] * 3)]))


def detector(kind: Any, **options: Any) -> Any:
    metrics = Evaluator(val_metrics=[AUROC(fields=["pred_score", "gt_label"], prefix="image_")])
    return kind(pre_processor=pre_processor(), evaluator=metrics, visualizer=False, **options)


built = partial(rows_of, make_loader=loader, predicts=False, loads=lambda: {"pre_processor": pre_processor()})
ROWS = [
    *built("Fastflow", partial(detector, Fastflow, pre_trained=False, flow_steps=2)),
    *built(
        "ReverseDistillation",
        partial(detector, ReverseDistillation, backbone="resnet18", pre_trained=False),
        # Features are computed without gradients.
        options={"ddp": {"find_unused_parameters": True}},
        batch_norm=True,
        tolerance=1e-4,  # Adam turns rounding into 5e-5 within three steps; its data has no double precision
    ),
    *built(
        "Ganomaly",
        # Its thresholds of pixels would stay NaN, which is equal to nothing.
        partial(detector, Ganomaly, batch_size=8, n_features=8, latent_vec_size=16, post_processor=False),
        loads=lambda: {"pre_processor": pre_processor(), "post_processor": False},
        # The discriminator and the generator are trained in turn.
        options={"ddp": {"find_unused_parameters": True}},
        batch_norm=True,
    ),
]
