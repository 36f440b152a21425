"""Distribution of the samples of a wave over ranks of unequal speed. Free of torch.

A wave (``Waves``) keeps its samples; only its cuts move.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

# Bisection steps: more than a double has digits.
_HALVINGS = 64


@dataclass(frozen=True)
class Bounds:
    """Minimum and maximum samples of a rank.

    Args:
        least_share: minimum, as a fraction of an equal share.
        most_share: maximum, as a multiple of an equal share.
        least_samples: minimum number of samples, in waves large enough for all.
    """

    least_share: float = 0.0
    most_share: float = math.inf
    least_samples: int = 1

    def of(self, samples: int, ranks: int) -> tuple[int, int]:
        """Return the minimum and maximum samples of a rank in a wave of ``samples``."""
        equal, each = samples / ranks, samples // ranks
        fewest = min(max(self.least_samples, math.floor(self.least_share * equal)), each)
        most = samples if math.isinf(self.most_share) else math.floor(self.most_share * equal)
        return fewest, max(most, -(-samples // ranks))


def divide(samples: int, seconds: Sequence[float], bounds: Bounds) -> list[int]:
    """Return the samples of each rank such that the last rank finishes as early as possible.

    Args:
        samples: of all ranks.
        seconds: per sample of each rank, in any unit; above 0.
        bounds: of each rank's samples.
    """
    fewest, most = bounds.of(samples, len(seconds))

    def done_within(limit: float) -> list[int]:
        return [min(max(int(limit / each), fewest), most) for each in seconds]

    possible, impossible = 0.0, max(seconds) * (samples + 1)
    for _ in range(_HALVINGS):
        middle = (possible + impossible) / 2
        if sum(done_within(middle)) <= samples:
            possible = middle
        else:
            impossible = middle
    sizes = done_within(possible)
    # The rest finish at the same time: one each, to the fastest and then the first ranks.
    next_done = [((size + 1) * each, rank) for rank, (size, each) in enumerate(zip(sizes, seconds, strict=True))]
    heapq.heapify(next_done)
    for _ in range(samples - sum(sizes)):
        while sizes[next_done[0][1]] >= most:
            heapq.heappop(next_done)
        rank = next_done[0][1]
        sizes[rank] += 1
        heapq.heapreplace(next_done, ((sizes[rank] + 1) * seconds[rank], rank))
    return sizes


def seconds_of_wave(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return when the last rank finishes."""
    return max(size * each for size, each in zip(sizes, seconds, strict=True))


def pays_off(samples: int, now: Sequence[float], then: Sequence[float], bounds: Bounds, least_gain: float) -> bool:
    """Return whether to change shares.

    Args:
        samples: of a full wave.
        now: seconds per sample behind the current shares.
        then: measured seconds per sample.
        bounds: of each rank's samples.
        least_gain: minimum gain, as a fraction of the time.
    """
    before = seconds_of_wave(divide(samples, now, bounds), then)
    return seconds_of_wave(divide(samples, then, bounds), then) < (1 - least_gain) * before


@dataclass
class _Entry:
    begin: tuple[int, int]  # epoch and first wave
    seconds: tuple[float, ...]
    cuts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by the samples of a wave


class ShareSchedule:
    """Shares of data ranks in each wave, equal on every rank. Waves are identified by epoch and index in it.

    Args:
        bounds: of each rank's samples.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._entries: list[_Entry] = []

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds per sample of each data rank behind the latest shares."""
        return self._entries[-1].seconds

    def start(self, seconds: Sequence[float]) -> None:
        """Divide every wave by these seconds per sample."""
        self._entries = [_Entry((-1, -1), tuple(seconds))]

    def change(self, epoch: int, wave: int, seconds: Sequence[float]) -> None:
        """Divide this wave and later ones by other seconds per sample.

        Args:
            epoch: of the wave.
            wave: not yet drawn by any rank, nor before that of an earlier change.
            seconds: of each data rank.
        """
        if self._entries[-1].begin == (epoch, wave):
            self._entries.pop()
        self._entries.append(_Entry((epoch, wave), tuple(seconds)))

    def drop_before(self, epoch: int, wave: int) -> None:
        """Drop waves before this one."""
        del self._entries[: self._index(epoch, wave)]

    def cuts(self, epoch: int, wave: int, samples: int) -> tuple[int, ...]:
        """Return the cuts of a wave of ``samples``: rank r gets those from the r-th number to the next."""
        entry = self._entries[self._index(epoch, wave)]
        if samples not in entry.cuts:
            entry.cuts[samples] = (0, *accumulate(divide(samples, entry.seconds, self.bounds)))
        return entry.cuts[samples]

    def _index(self, epoch: int, wave: int) -> int:
        return bisect_right(self._entries, (epoch, wave), key=lambda entry: entry.begin) - 1


@dataclass(frozen=True)
class PassShares:
    """Shares in a pass over an epoch.

    Args:
        schedule: of the run.
        epoch: the epoch.
        first: index in the epoch of the first wave of the pass.
    """

    schedule: ShareSchedule
    epoch: int
    first: int

    def part(self, wave: int, samples: int, rank: int) -> tuple[int, int]:
        """Return the range ``[first, last)`` of samples that ``rank`` reads of the ``wave``-th wave of the pass."""
        cuts = self.schedule.cuts(self.epoch, self.first + wave, samples)
        return cuts[rank], cuts[rank + 1]
