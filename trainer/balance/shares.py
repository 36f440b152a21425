"""How the samples of a wave are dealt out to ranks of unequal speed, and from when on. Without torch.

What a step consists of never changes: a wave (``Waves``) keeps its samples, only where
it is cut moves.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

# Halvings of the time within which a wave is done: more than a double has digits.
_HALVINGS = 64


@dataclass(frozen=True)
class Bounds:
    """How few and how many samples a rank may have.

    Args:
        least_share: part of an equal share that a rank keeps at least.
        most_share: times an equal share that a rank gets at most.
        least_samples: samples that a rank keeps at least, in waves that have as many for each.
    """

    least_share: float = 0.0
    most_share: float = math.inf
    least_samples: int = 1

    def of(self, samples: int, ranks: int) -> tuple[int, int]:
        """Fewest and most samples of a rank in a wave of ``samples``."""
        equal, each = samples / ranks, samples // ranks
        fewest = min(max(self.least_samples, math.floor(self.least_share * equal)), each)
        most = samples if math.isinf(self.most_share) else math.floor(self.most_share * equal)
        return fewest, max(most, -(-samples // ranks))


def deal_out(samples: int, seconds: Sequence[float], bounds: Bounds) -> list[int]:
    """Samples of each rank such that the last rank is done as early as can be.

    Args:
        samples: of all ranks.
        seconds: that each rank takes for one sample, in any unit; above 0.
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
    # Those that are done at the same time are left: one each, the fastest and then the first ranks before others.
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
    """When the last rank is done."""
    return max(size * each for size, each in zip(sizes, seconds, strict=True))


def is_worth_it(samples: int, now: Sequence[float], then: Sequence[float], bounds: Bounds, least_gain: float) -> bool:
    """Whether to deal by other seconds per sample than now.

    Args:
        samples: of a full wave.
        now: by which shares are dealt.
        then: what ranks are found to take.
        bounds: of each rank's samples.
        least_gain: part of the time that must be gained.
    """
    before = seconds_of_wave(deal_out(samples, now, bounds), then)
    return seconds_of_wave(deal_out(samples, then, bounds), then) < (1 - least_gain) * before


@dataclass
class _Entry:
    seconds: tuple[float, ...]
    cuts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by the samples of a wave


class ShareSchedule:
    """Who gets how much of which wave; the same on every rank.

    Waves are known by their epoch and their index in it, as the loop counts batches.

    Args:
        bounds: of each rank's samples.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._begins: list[tuple[int, int]] = []
        self._entries: list[_Entry] = []

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds per sample of each data rank by which the latest shares are dealt; equal ones are equal shares."""
        return self._entries[-1].seconds

    def start(self, seconds: Sequence[float]) -> None:
        """Deal every wave by these seconds per sample."""
        self._begins, self._entries = [(-1, -1)], [_Entry(tuple(seconds))]

    def change(self, epoch: int, wave: int, seconds: Sequence[float]) -> None:
        """Deal this wave and later ones by other seconds per sample.

        Args:
            epoch: of the wave.
            wave: one that no rank has drawn yet; not before that of an earlier change.
            seconds: of each data rank.
        """
        if self._begins[-1] == (epoch, wave):
            self._entries[-1] = _Entry(tuple(seconds))
            return
        self._begins.append((epoch, wave))
        self._entries.append(_Entry(tuple(seconds)))

    def forget_before(self, epoch: int, wave: int) -> None:
        """Waves before this one are not asked for any more."""
        first = bisect_right(self._begins, (epoch, wave)) - 1
        del self._begins[:first], self._entries[:first]

    def sizes(self, epoch: int, wave: int, samples: int) -> list[int]:
        """Samples of each data rank in a wave of ``samples``."""
        cuts = self.cuts(epoch, wave, samples)
        return [last - first for first, last in zip(cuts, cuts[1:], strict=False)]

    def latest_sizes(self, samples: int) -> list[int]:
        """Samples of each data rank in a wave of ``samples`` by the latest shares."""
        return deal_out(samples, self.seconds, self.bounds)

    def cuts(self, epoch: int, wave: int, samples: int) -> tuple[int, ...]:
        """Where a wave of ``samples`` is cut: rank r gets those from the r-th of these numbers to the next."""
        entry = self._entries[bisect_right(self._begins, (epoch, wave)) - 1]
        if samples not in entry.cuts:
            entry.cuts[samples] = (0, *accumulate(deal_out(samples, entry.seconds, self.bounds)))
        return entry.cuts[samples]


@dataclass(frozen=True)
class SharesFrom:
    """The shares of a pass over an epoch that begins with a certain wave.

    Args:
        schedule: of the run.
        epoch: the epoch.
        first: index in the epoch of the first wave of the pass.
    """

    schedule: ShareSchedule
    epoch: int
    first: int

    def part(self, wave: int, samples: int, rank: int) -> tuple[int, int]:
        """Samples ``[first, last)`` of the ``wave``-th wave of the pass, which has ``samples``, that ``rank`` reads."""
        cuts = self.schedule.cuts(self.epoch, self.first + wave, samples)
        return cuts[rank], cuts[rank + 1]
