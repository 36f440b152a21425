"""How many blocks to gather ahead: what a step of ZeRO-3 waits for its parameters and gradients, gone through in order.

Arithmetic alone. One link serves collectives in the order in which they are asked for, beside computing: in forward and
backward the parameters of each block, and in backward its gradients, which stand in the way of what is gathered behind
them. So a depth of 1 is enough where both fit behind computing; a deeper one helps where they only fit together.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_AHEAD = 4
"""Blocks that are considered: each takes the memory of a whole one."""
# Part of what a micro-batch computes that a deeper one must save.
_WORTH = 0.01


@dataclass(frozen=True)
class BlockTimes:
    """Of one of equal blocks, in seconds.

    Args:
        blocks: how many there are.
        forward, backward: computing a micro-batch.
        gather: parameters.
        reduce: gradients; 0: not for every micro-batch.
    """

    blocks: int
    forward: float
    backward: float
    gather: float
    reduce: float

    @property
    def compute(self) -> float:
        """Seconds of a micro-batch without waits."""
        return self.blocks * (self.forward + self.backward)

    def waits(self, depth: int) -> float:
        """Seconds that a micro-batch waits if so many blocks are gathered ahead."""
        link = _Link(self)
        now = link.passed(0.0, depth, self.forward, 0.0)
        now = link.passed(now, depth, self.backward, self.reduce)
        return max(now, link.free) - self.compute


class _Link:
    """One that is free again at a time."""

    def __init__(self, times: BlockTimes) -> None:
        self._times, self.free = times, 0.0

    def passed(self, now: float, depth: int, compute: float, reduce: float) -> float:
        """When a pass through all blocks has ended that begins ``now``."""
        ready: list[float] = []
        for block in range(self._times.blocks):
            self._gather(ready, block + 1 if depth == 0 else min(max(depth, block + 1), self._times.blocks), now)
            now = max(now, ready[block])
            self._gather(ready, min(block + 1 + depth, self._times.blocks), now)
            now += compute
            if reduce:
                self.free = max(self.free, now) + reduce
        return now

    def _gather(self, ready: list[float], until: int, now: float) -> None:
        while len(ready) < until:
            self.free = max(self.free, now) + self._times.gather
            ready.append(self.free)


def best_depth(times: BlockTimes, room: int = MOST_AHEAD) -> int:
    """The smallest from 1 on that waits least, by what is worth another block's memory.

    Args:
        times: of the blocks.
        room: blocks that there is memory for; more than :data:`MOST_AHEAD` are not considered.
    """
    depths = range(1, max(min(room, MOST_AHEAD), 1) + 1)
    waits = [times.waits(depth) for depth in depths]
    enough = min(waits) + _WORTH * times.compute
    return next(depth for depth, each in zip(depths, waits, strict=True) if each <= enough)
