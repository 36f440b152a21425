"""Linear layers that compute in float8, by torchao (extra ``torchao``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from trainwright.recipes.extras import FLOAT8_RECIPES, MISSING_TORCHAO

# The kernels multiply tiles of this many numbers.
_TILE = 16


def to_float8(model: nn.Module, recipe: str = "rowwise") -> list[str]:
    """Make the linear layers of blocks compute in float8: inputs, weights and gradients are cast at each use.

    Parameters, their names, hooks and initialization stay. Without a GPU, float8 is emulated, which is slow; a GPU
    needs compute capability 8.9 or more. Layers outside of an ``nn.ModuleList`` (embeddings, the head), routers, and
    layers whose sizes are not multiples of 16 stay as they are.

    Args:
        model: with its layers, also on the meta device; changed in place.
        recipe: ``rowwise``: a scale per row, so that layouts compute the same up to float8's rounding; ``tensorwise``:
            a scale per tensor, faster, but parts of a tensor have other scales.

    Returns:
        Names of the layers.

    Raises:
        ModuleNotFoundError: if torchao is not installed.
        ValueError: for another recipe, or if no layer can compute in float8.
    """
    if recipe not in FLOAT8_RECIPES:
        raise ValueError(f"float8={recipe} (allowed: {', '.join(FLOAT8_RECIPES)}). Type float8=rowwise")
    if importlib.util.find_spec("torchao") is None:
        raise ModuleNotFoundError(MISSING_TORCHAO.format(given=recipe))
    from torchao.float8 import Float8LinearConfig

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=not torch.cuda.is_available())
    lists = [f"{name}." for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    found = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.startswith(tuple(lists)) and _fits(name, layer)
    ]
    if not found:
        raise ValueError(
            f"float8={recipe}: {type(model).__name__} has no nn.Linear in an nn.ModuleList whose sizes are multiples "
            f"of {_TILE}. Leave float8 out, or choose other sizes."
        )
    settings = _settings(config)
    for name in found:
        # Its class changes, rather than the layer being replaced, so that hooks and `reset_parameters` stay.
        layer: Any = model.get_submodule(name)
        plain: type[nn.Linear] = type(layer)
        layer.__class__ = _float8_class(plain)  # type: ignore[arg-type]
        vars(layer).update(settings)
    return found


def _fits(name: str, layer: nn.Linear) -> bool:
    return not name.endswith("router") and layer.in_features % _TILE == layer.out_features % _TILE == 0


def _settings(config: Any) -> Mapping[str, Any]:
    """Return the attributes that a layer of torchao has besides those of ``nn.Linear``."""
    from torchao.float8.float8_linear import Float8Linear

    layer, plain = Float8Linear(1, 1, config=config, device="meta"), nn.Linear(1, 1, device="meta")
    return {name: value for name, value in vars(layer).items() if name not in vars(plain)}


@cache
def _float8_class(plain: type[nn.Linear]) -> type[nn.Linear]:
    from torchao.float8.float8_linear import Float8Linear

    return type(f"Float8{plain.__name__}", (Float8Linear, plain), {})
