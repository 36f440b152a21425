"""careamics: its module for denoising, supervised and by masked pixels, with its U-Net.

Its ``predict_step`` needs the library's own data module, so prediction isn't tried.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import tests.libraries.alias  # noqa: F401  # isort: skip

import torch
from careamics.config import FCNAlgorithmConfig
from careamics.lightning import FCNModule
from torch import Tensor
from torch.utils.data import DataLoader

from tests.libraries.base import order, rows_of

SAMPLES, SIZE = 24, 16


@cache
def patches(masked: bool) -> list[tuple[Tensor, ...]]:
    """Noisy patches and clean ones; ``masked``: patches without some pixels, the whole patches, and the masks."""
    generator = torch.Generator().manual_seed(11)
    clean = torch.rand(SAMPLES, 1, SIZE, SIZE, generator=generator)
    noisy = clean + 0.1 * torch.randn(clean.shape, generator=generator)
    if not masked:
        return list(zip(noisy, clean, strict=True))
    # As many pixels in each patch, so that means of ranks are of as many.
    mask = (torch.arange(SIZE * SIZE) % 16 == 5).view(1, SIZE, SIZE).float()
    return [(torch.where(mask > 0, patch.roll(1, -1), patch), patch, mask) for patch in noisy]


def loader(masked: bool, batch: int, shuffled: bool) -> DataLoader:
    data: Any = patches(masked)
    return DataLoader(data, batch, sampler=order(data, shuffled))


def configured(algorithm: str, loss: str, **options: Any) -> dict[str, Any]:
    network = {"architecture": "UNet", "num_channels_init": 8, "independent_channels": False, **options}
    # Biases before batch statistics have gradients of rounding only, which Adam would enlarge.
    optimizer = {"name": "SGD", "parameters": {"lr": 0.1, "momentum": 0.9}}
    return {"algorithm": algorithm, "loss": loss, "model": network, "optimizer": optimizer}


def of(name: str, config: dict[str, Any]) -> list[Any]:
    return rows_of(
        name,
        lambda: FCNModule(FCNAlgorithmConfig(**config)),
        partial(loader, config["algorithm"] == "n2v"),
        predicts=False,
        loads=lambda: {"algorithm_config": config},
        batch_norm=True,
        package="pytorch_lightning",
    )


ROWS = [
    *of("FCNModule, CARE", configured("care", "mse")),
    *of("FCNModule, N2V2", configured("n2v", "n2v", n2v2=True)),
]
