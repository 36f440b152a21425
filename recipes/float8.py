"""Linear layers that compute in float8, by torchao (extra ``torchao``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

RECIPES = ("rowwise", "tensorwise")
"""Scaling of float8 numbers, by torchao's names."""
MISSING = 'module.float8={given} needs torchao, which is not installed. Type: pip install "trainwright[torchao]"'
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
    import torch
    from torch import nn

    if recipe not in RECIPES:
        raise ValueError(f"float8={recipe} (allowed: {', '.join(RECIPES)}). Type float8=rowwise")
    if importlib.util.find_spec("torchao") is None:
        raise ModuleNotFoundError(MISSING.format(given=recipe))
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
    for name in found:
        _convert(model.get_submodule(name), config)
    return found


def _fits(name: str, layer: nn.Linear) -> bool:
    return not name.endswith("router") and layer.in_features % _TILE == layer.out_features % _TILE == 0


def _convert(layer: Any, config: Any) -> None:
    """Change the class of a layer rather than replace it, so that hooks and ``reset_parameters`` stay."""
    from torch import nn
    from torchao.float8.float8_linear import Float8Linear

    template = Float8Linear(1, 1, config=config, device="meta")
    more = vars(template).keys() - vars(nn.Linear(1, 1, device="meta")).keys()
    plain: type[nn.Linear] = type(layer)
    layer.__class__ = _float8_class(plain)  # type: ignore[arg-type]
    vars(layer).update({name: vars(template)[name] for name in more})


@cache
def _float8_class(plain: type[nn.Linear]) -> type[nn.Linear]:
    from torchao.float8.float8_linear import Float8Linear

    return type(f"Float8{plain.__name__}", (Float8Linear, plain), {})


def check(config: Mapping[str, Any], num_data_ranks: int) -> list[str]:
    """Return problems of ``module.float8``, without importing torch.

    Args:
        config: the composed configuration.
        num_data_ranks: ranks that read different samples.
    """
    given = config["module"].get("float8")
    if given is None:
        return []
    problems = []
    if given not in RECIPES:
        problems.append(f"module.float8={given} (allowed: null, {', '.join(RECIPES)}). Type module.float8=rowwise")
    elif importlib.util.find_spec("torchao") is None:
        problems.append(MISSING.format(given=given))
    if config["precision"] not in ("bf16-mixed", "bf16-true"):
        problems.append(
            f"module.float8={given} with precision={config['precision']}: float8 kernels return bf16. Type "
            "precision=bf16-mixed (or bf16-true)"
        )
    return problems


__all__ = ["check", "to_float8"]
