"""Families of timm, small and with random weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import nn

from tests.zoo.base import CLASSES, SAMPLES, Classifier, _labels, _random, images, loader
from tests.zoo.cells import Row

_OF_TORCHVISION = ("", ".transforms", ".transforms.functional", ".datasets", ".ops", ".ops.misc")


@cache
def models() -> ModuleType:
    """``timm.models``. timm loads torchvision for its data sets, of which no build on PyPI runs beside a CPU torch."""
    absent: dict[str, Any] = {f"torchvision{name}": MagicMock() for name in _OF_TORCHVISION}
    absent["torchvision.ops.misc"].FrozenBatchNorm2d = type("FrozenBatchNorm2d", (nn.Module,), {})
    with patch.dict(sys.modules, {**absent, "torchvision.models": None}):
        import timm.layers
        import timm.models
    for name in absent:
        sys.modules.pop(name, None)
    return timm.models


def larger(batch: int) -> Any:
    """``(x: (B, 3, 32, 32), y: (B,))``."""
    return loader(batch, torch.randn(SAMPLES, 3, 32, 32, generator=_random()), _labels(SAMPLES))


def build(path: str, **options: Any) -> nn.Module:
    """A model: ``path`` is a class by file, or the function that makes one; options with a dot are looked up, too."""
    found = {key: attrgetter(value)(models()) if isinstance(value, str) else value for key, value in options.items()}
    model: nn.Module = attrgetter(path)(models())(num_classes=CLASSES, **found)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)  # weights that are zero at first would hide what is wrong behind them
    return model.train()


class Pictures(Classifier):
    """A model of timm that classifies images; where it has a second head, for distillation, their mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        return torch.stack(out).mean(0) if isinstance(out, tuple) else out


def of(path: str, **options: Any) -> Callable[[], Pictures]:
    return lambda: Pictures(lambda: build(path, **options))


VIT = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4}
MIXER = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "num_blocks": 2}
WINDOWS = {
    "img_size": 8, "patch_size": 2, "window_size": 2, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 4),
    "drop_path_rate": 0.0,
}  # fmt: skip
RESMLP = {"mlp_ratio": 4, "block_layer": "mlp_mixer.ResBlock", "norm_layer": "mlp_mixer.Affine"}
GMLP = {"mlp_ratio": 4, "block_layer": "mlp_mixer.SpatialGatingBlock", "mlp_layer": "mlp_mixer.GatedMlp"}
STAGES = {"depths": (1, 1, 1, 1)}
CONVNEXT = {**STAGES, "dims": (8, 8, 16, 16)}
PYRAMID = {**STAGES, "embed_dims": (8, 8, 16, 16), "num_heads": (1, 2, 2, 4)}
HIERA = {"img_size": (32, 32), "embed_dim": 8, "num_heads": 1, "stages": (1, 1, 1, 1)}
SEQUENCER = {
    "img_size": 8, "patch_sizes": (4, 1, 1, 1), "layers": (1,) * 4, "embed_dims": (8,) * 4, "hidden_sizes": (4,) * 4,
}  # fmt: skip
NEST = {"embed_dims": (8,) * 3, "num_heads": (2,) * 3, "depths": (1,) * 3, "drop_path_rate": 0.0}
RESNET = {"layers": (1, 1, 1, 1), "channels": (4, 4, 8, 8)}
ALL = "zero3, tensor, pipeline"
# A rank's own statistics of a batch are those of one process only where each rank sees all of it.
WHOLE = "tensor"
ROWS = [
    Row("vit", of("vision_transformer.VisionTransformer", **VIT), images, either=ALL),
    Row("vit, layer scale", of("vision_transformer.VisionTransformer", **VIT, init_values=0.1), images, either=ALL),
    Row("deit", of("deit.VisionTransformerDistilled", **VIT), images, either=ALL),
    Row("eva", of("eva.Eva", **VIT), images, either=ALL),
    Row("beit", of("beit.Beit", **VIT, init_values=0.1), images, either=ALL),
    Row("cait", of("cait.Cait", **VIT), images, either=ALL),
    Row("swin", of("swin_transformer.SwinTransformer", **WINDOWS), images, either=ALL),
    Row("swin v2", of("swin_transformer_v2.SwinTransformerV2", **WINDOWS), images, either=ALL),
    Row("convnext", of("convnext.ConvNeXt", **CONVNEXT), larger, either=ALL),
    Row("convnext v2", of("convnext.ConvNeXt", **CONVNEXT, use_grn=True, ls_init_value=None), larger, either=ALL),
    Row("pvt", of("pvt_v2.PyramidVisionTransformerV2", **PYRAMID), larger, either=ALL),
    Row("twins", of("twins.Twins", img_size=32, **PYRAMID), larger, either=ALL),
    Row("mixer", of("mlp_mixer.MlpMixer", **MIXER), images, either=ALL),
    Row("resmlp", of("mlp_mixer.MlpMixer", **MIXER, **RESMLP), images, either=ALL),
    Row("gmlp", of("mlp_mixer.MlpMixer", **MIXER, **GMLP), images, either=ALL),
    Row("metaformer", of("metaformer.MetaFormer", depths=(2, 2), dims=(8, 16)), images, either=ALL),
    Row("focalnet", of("focalnet.FocalNet", **STAGES, embed_dim=8, drop_path_rate=0.0), larger, either=ALL),
    Row("hiera", of("hiera.Hiera", **HIERA), larger, either=ALL),
    Row("edgenext", of("edgenext.EdgeNeXt", **STAGES, dims=(8, 8, 16, 16)), larger, either=ALL),
    # Of its first bias the gradient is next to nothing.
    Row("sequencer", of("sequencer.Sequencer2d", **SEQUENCER), images, either=ALL, tolerance=3e-4),
    Row("nest", of("nest.Nest", img_size=32, **NEST), larger, either=ALL),
    Row("xcit", of("xcit.Xcit", img_size=32, patch_size=16, embed_dim=16, depth=2, num_heads=4), larger, either=WHOLE),
    Row("convmixer", of("convmixer.ConvMixer", dim=16, depth=2, kernel_size=3, patch_size=2), images, either=WHOLE),
    Row("resnet", of("resnet.ResNet", block="resnet.Bottleneck", **RESNET), larger, either=WHOLE),
]
