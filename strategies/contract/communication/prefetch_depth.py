"""Prefetch depth of ZeRO-3, by simulating a micro-batch.

One link serves collectives in order, parallel to compute: all-gathers of each block's parameters in forward and
backward, and reductions of its gradients in backward, which delay later all-gathers. Depth 1 suffices if both fit
behind compute per block; a larger depth helps if they fit only in total.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_AHEAD = 4
"""Largest depth considered: each prefetched block takes its full memory."""
# Fraction of compute that another prefetched block must save.
_WORTH = 0.01


@dataclass(frozen=True)
class BlockTimes:
    """Times of one of equal blocks, in seconds.

    Args:
        blocks: number of blocks.
        forward, backward: compute of a micro-batch.
        gather: all-gather of parameters.
        reduce: reduction of gradients; 0: not in every micro-batch.
    """

    blocks: int
    forward: float
    backward: float
    gather: float
    reduce: float

    @property
    def compute(self) -> float:
        """Compute seconds of a micro-batch, without waits."""
        return self.blocks * (self.forward + self.backward)

    def waits(self, depth: int) -> float:
        """Return the seconds that a micro-batch waits at a prefetch depth."""
        link = _Link(self)
        now = link.passed(0.0, depth, self.forward, 0.0)
        now = link.passed(now, depth, self.backward, self.reduce)
        return max(now, link.free) - self.compute


class _Link:
    """Simulated link; ``free`` is when its last collective ends."""

    def __init__(self, times: BlockTimes) -> None:
        self._times, self.free = times, 0.0

    def passed(self, now: float, depth: int, compute: float, reduce: float) -> float:
        """Return the end time of a pass through all blocks that begins ``now``."""
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
    """Return the smallest depth, at least 1, whose wait is within a tolerance of the best.

    Args:
        times: of the blocks.
        room: number of blocks that fit into memory, capped at :data:`MOST_AHEAD`.
    """
    depths = range(1, max(min(room, MOST_AHEAD), 1) + 1)
    waits = [times.waits(depth) for depth in depths]
    enough = min(waits) + _WORTH * times.compute
    return next(depth for depth, each in zip(depths, waits, strict=True) if each <= enough)
