"""The repeated blocks of a module: which of them are equal, and the module with a few of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from trainwright.strategies.plan.blocks import find_blocks

# Attributes in which equal blocks differ: their place in the model.
_PLACE = re.compile(r"(^|_)(idx|index|layer_id|layer_number|layer_idx|depth|name)$")


def block_names(module: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Names of the repeated blocks, in order; of several lists of blocks, of the one with the most parameters.

    Args:
        module: whole.
        patterns: of the blocks; ``None``: they are found.
    """
    found = find_blocks(module, patterns)
    runs: dict[str, list[str]] = {}
    for name in found:
        runs.setdefault(name.rpartition(".")[0], []).append(name)
    if not runs:
        return []
    # Of several lists the heaviest is the model; the others count with what is outside.
    weight = {parent: sum(_numel(found[name]) for name in names) for parent, names in runs.items()}
    return runs[max(weight, key=lambda parent: weight[parent])]


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def kinds_of(blocks: Sequence[nn.Module]) -> list[int]:
    """For each block the number of its kind: equal ones have the same classes, shapes and settings within."""
    known: dict[tuple[Any, ...], int] = {}
    return [known.setdefault(_likeness(block), len(known)) for block in blocks]


def _likeness(block: nn.Module) -> tuple[Any, ...]:
    parts: list[Any] = []
    for name, module in block.named_modules():
        settings = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, (int, float, str)) and not key.startswith("_") and not _PLACE.search(key)
        )
        shapes = tuple(
            (key, tuple(p.shape), p.dtype, p.requires_grad) for key, p in module._parameters.items() if p is not None
        )
        parts.append((name, type(module), settings, shapes))
    return tuple(parts)


class Last:
    """What the last block that ran has returned."""

    def __init__(self) -> None:
        self.output: Any = None

    def remember(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keep it; a forward hook of the blocks that run."""
        self.output = output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.output

    def __deepcopy__(self, memo: Any) -> Last:
        return self


def with_blocks(module: LightningModule, names: Sequence[str], active: Collection[int], last: Last) -> LightningModule:
    """A copy of a module with some of its blocks; the others are shells without parameters.

    Args:
        module: whole.
        names: of all its blocks.
        active: places of those that the copy has.
        last: what the shells hand on.
    """
    memo: dict[int, Any] = {}
    for index, name in enumerate(names):
        if index not in active:
            block = module.get_submodule(name)
            memo[id(block)] = _shell(block, last)
    trainer, module._trainer = module._trainer, None
    try:
        return copy.deepcopy(module, memo)
    finally:
        module._trainer = trainer


def _shell(block: nn.Module, last: Last) -> nn.Module:
    """A block of the same class and settings without parameters, that hands on what the last real one gave."""
    shell = copy.copy(block)
    shell.__dict__ = {**block.__dict__}
    for kind in ("_parameters", "_modules", "_buffers", "_forward_hooks", "_forward_pre_hooks"):
        shell.__dict__[kind] = {}
    shell.__dict__["forward"] = last
    return shell
