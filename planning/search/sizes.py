"""Sizes of axes and micro-batches, and stages of ZeRO, that the search tries."""

from __future__ import annotations

import math
from functools import lru_cache

from trainwright.core.layout import Layout
from trainwright.strategies.compose.rules import cuts_module

_MOST_MICRO_BATCHES = 8
_STAGES = (1, 2, 3)


@lru_cache(maxsize=256)
def divisors_of(number: int) -> tuple[int, ...]:
    """Return all divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def shards_of(data: int, node: int) -> list[int]:
    """Return the tried sizes of the shard axis: none, all, a node's, and some in between.

    Args:
        data: ranks of the data axes.
        node: of these, ranks per node.
    """
    found, divisors = {1, data}, divisors_of(data)
    found |= {max(d for d in divisors if d <= node)}
    last = 1
    for each in divisors:
        if each >= 4 * last:
            found.add(each)
            last = each
    return sorted(found)


def strategies_for(layout: Layout) -> list[tuple[str, int]]:
    """Return the strategies that run a closed layout, each with its stage of ZeRO; 0: none."""
    if not cuts_module(layout):
        if layout.world_size == 1:
            return [("single", 0)]
        return [("ddp", 0)] if layout.shard == 1 else [(f"zero{stage}", stage) for stage in _STAGES]
    if layout.state_ranks == 1:
        return [("hybrid", 1)]
    # A pipeline holds whole gradients until all its micro-batches end, so stage 2 equals stage 1.
    return [("hybrid", stage) for stage in (_STAGES if layout.pipeline == 1 else (1, 3))]


def micro_batches_of(samples: int | None) -> list[int]:
    """Return the tried micro-batch sizes in descending order.

    Args:
        samples: that a data rank reads at a time; ``None``: chosen.
    """
    if samples is None:
        return [32, 16, 8, 4, 2, 1]
    divisors = [d for d in divisors_of(samples) if d <= 256]
    if len(divisors) > _MOST_MICRO_BATCHES:
        halved = [d for d in divisors if d & (d - 1) == 0]
        divisors = halved if len(halved) > 2 else divisors[:_MOST_MICRO_BATCHES]
    return divisors[::-1]
