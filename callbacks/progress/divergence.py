"""The first loss that is not finite, and what to try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_ADVICE = "Lower the learning rate (optimizer.lr=...)"
_CLIP = "clip gradients (trainer.gradient_clip_val=1.0)"
ADVICE = f"{_ADVICE}, {_CLIP}, or keep such steps out of the weights (guard=skip, guard=rollback or guard=stop)."
ADVICE_ALONE = (
    f"{_ADVICE} and a large momentum, or {_CLIP}: workers that step by themselves need about the learning rate of "
    "workers in step, divided by their number."
)


@dataclass(frozen=True)
class Divergence:
    """The first step whose loss was NaN or infinite.

    Args:
        step: its number in the logs, from 0.
        loss: of that step.
        ranks: whose own loss was not finite; ``()``: each was, but not their mean.
    """

    step: int
    loss: float
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        where = f" (rank{'s' if len(self.ranks) > 1 else ''} {ranks})" if self.ranks else ""
        return f"the loss is {self.loss:g} at step {self.step}{where}"


def first_nonfinite(values: Sequence[float]) -> int | None:
    """Index of the first value that is NaN or infinite; ``None``: all are finite."""
    return next((index for index, value in enumerate(values) if not math.isfinite(value)), None)


def ranks_where(found: bool, trainer: Any, *, together: bool) -> tuple[int, ...]:
    """The ranks on which something was found; a collective if they are ``together``, else this one alone."""
    if not together:
        return (trainer.global_rank,) if found else ()
    flags = torch.zeros(trainer.world_size, device=trainer.strategy.root_device)
    flags[trainer.global_rank] = float(found)
    flags = trainer.strategy.reduce(flags, reduce_op="sum")
    return tuple(flags.nonzero().flatten().tolist())
