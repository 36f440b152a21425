"""Linear layers that compute in float8, by torchao (extra ``torchao``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.recipes.extras import FLOAT8_RECIPES, MISSING_TORCHAO

# The kernels multiply tiles of this many numbers.
_TILE = 16
# Numbers that share a scale in mxfp8 (OCP Microscaling Formats 1.0), along the summed dim.
_MX_BLOCK = 32


def to_float8(model: nn.Module, recipe: str = "rowwise") -> list[str]:
    """Make the linear layers of blocks compute in float8: inputs, weights and gradients are cast at each use.

    Parameters, their names, hooks and initialization stay. Without a GPU, float8 is emulated, which is slow; a GPU
    needs compute capability 8.9 or more, for ``mxfp8`` 10.0. Layers outside of an ``nn.ModuleList`` (embeddings, the
    head), routers, and layers whose sizes are not multiples of 16 (``mxfp8``: 32) stay as they are.

    Args:
        model: with its layers, also on the meta device; changed in place.
        recipe: ``rowwise``: a scale per row, so that layouts compute the same up to float8's rounding; ``tensorwise``:
            a scale per tensor, faster, but parts of a tensor have other scales; ``mxfp8``: a power of two per 32
            numbers of a row, which parts share.

    Returns:
        Names of the layers.

    Raises:
        ModuleNotFoundError: if torchao is not installed.
        ValueError: for another recipe, if no layer can compute in float8, or if this GPU cannot compute ``mxfp8``.
    """
    if recipe not in FLOAT8_RECIPES:
        raise ValueError(f"float8={recipe} (allowed: {', '.join(FLOAT8_RECIPES)}). Type float8=rowwise")
    if importlib.util.find_spec("torchao") is None:
        raise ModuleNotFoundError(MISSING_TORCHAO.format(given=recipe))
    tile = _MX_BLOCK if recipe == "mxfp8" else _TILE
    lists = [f"{name}." for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    found = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.startswith(tuple(lists)) and _fits(name, layer, tile)
    ]
    if not found:
        raise ValueError(
            f"float8={recipe}: {type(model).__name__} has no nn.Linear in an nn.ModuleList whose sizes are multiples "
            f"of {tile}. Leave float8 out, or choose other sizes."
        )
    computing, settings = _mxfp8() if recipe == "mxfp8" else _scaled(recipe)
    for name in found:
        # Its class changes, rather than the layer being replaced, so that hooks and `reset_parameters` stay.
        layer: Any = model.get_submodule(name)
        layer.__class__ = _float8_class(computing, type(layer))  # type: ignore[arg-type]
        vars(layer).update(settings)
    return found


def _fits(name: str, layer: nn.Linear, tile: int) -> bool:
    return not name.endswith("router") and layer.in_features % tile == layer.out_features % tile == 0


def _scaled(recipe: str) -> tuple[type[nn.Linear], Mapping[str, Any]]:
    """Return torchao's layer, and the attributes that it has besides those of ``nn.Linear``."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=not torch.cuda.is_available())
    layer, plain = Float8Linear(1, 1, config=config, device="meta"), nn.Linear(1, 1, device="meta")
    return Float8Linear, {name: value for name, value in vars(layer).items() if name not in vars(plain)}


def _mxfp8() -> tuple[type[nn.Linear], Mapping[str, Any]]:
    emulates = not torch.cuda.is_available()
    if not emulates and torch.cuda.get_device_capability() < (10, 0):
        found = ".".join(map(str, torch.cuda.get_device_capability()))
        raise ValueError(
            f"float8=mxfp8 needs a GPU of compute capability 10.0 or more (B200); this one has {found}. Type "
            "float8=rowwise."
        )
    return Mxfp8Linear, {"emulates": emulates}


class Mxfp8Linear(nn.Linear):
    """Linear layer that multiplies in MXFP8: float8 numbers with one power of two per 32 of them.

    Products and casts are torchao's (``mx_mm``); autocast rounds input and weight before, as for ``nn.Linear``.
    """

    emulates: bool

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``.

        Raises:
            ValueError: if sizes of this rank's part are no multiples of 32.
        """
        sizes = {"inputs": input.shape[-1], "outputs": len(self.weight)}
        odd = [f"{size} {what}" for what, size in sizes.items() if size % _MX_BLOCK]
        if odd:
            raise ValueError(
                f"float8=mxfp8: {' and '.join(odd)} of a layer on one rank (allowed: multiples of {_MX_BLOCK}). Choose "
                "other sizes or fewer ranks, or type float8=rowwise."
            )
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        rows = input.to(dtype).reshape(-1, input.shape[-1])
        # The weight's gradient sums over rows, also in blocks of 32; zeros change neither scales nor sums.
        padded = functional.pad(rows, (0, 0, 0, -len(rows) % _MX_BLOCK))
        output = _mx_product(padded, self.weight.to(dtype), self.emulates)[: len(rows)]
        output = output.reshape(*input.shape[:-1], -1)
        return output if self.bias is None else output + self.bias.to(dtype)


def _mx_product(input: Tensor, weight: Tensor, emulates: bool) -> Tensor:
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats import config
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    rows, columns = config.MXFP8Dim0CastKernelChoice, config.MXFP8Dim1CastKernelChoice
    kernels = (
        (KernelPreference.EMULATED, rows.TORCH, columns.TORCH)
        if emulates
        else (KernelPreference.AUTO, rows.TRITON, columns.CUDA)
    )
    dtypes = (torch.float8_e4m3fn,) * 3
    rounding = config.ScaleCalculationMode.RCEIL  # a block's largest number does not overflow
    output: Tensor = mx_mm.apply(input, weight, *dtypes, _MX_BLOCK, *kernels, rounding, False)
    return output


@cache
def _float8_class(computing: type[nn.Linear], plain: type[nn.Linear]) -> type[nn.Linear]:
    return type(f"Float8{plain.__name__}", (computing, plain), {})
