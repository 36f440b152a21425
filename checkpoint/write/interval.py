"""When to save: often enough that little is lost, seldom enough that saving costs little."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# A look costs one small collective, so a look too many is cheap; one that comes too late is not.
_Answer = tuple[bool, int]


def young_daly(cost_seconds: float, mtbf_seconds: float) -> float:
    """Seconds of training between two saves that lose least time to saving and to doing lost work again.

    ``sqrt(2 C M)`` is Young's first-order optimum (J. W. Young, "A first order approximation to the optimum checkpoint
    interval", CACM 17(9), 1974). Daly's higher-order estimate corrects it where saving is not short against the time
    between failures (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS
    22(3), 2006, equation 37): ``sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C``, and ``M`` where ``C >= 2M``.

    Args:
        cost_seconds: C, how long training stands still for one save.
        mtbf_seconds: M, mean time between failures of the whole job.

    Raises:
        ValueError: if the cost is negative or the time between failures not positive.
    """
    if cost_seconds < 0 or mtbf_seconds <= 0:
        raise ValueError(
            f"young_daly({cost_seconds}, {mtbf_seconds}) (allowed: a cost of 0 or more seconds, and more than 0 "
            "seconds between failures)"
        )
    if cost_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    part = cost_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * cost_seconds * mtbf_seconds) * (1 + math.sqrt(part) / 3 + part / 9) - cost_seconds


class AutoInterval:
    """Young's and Daly's interval for the cost that is measured while a run goes on.

    Args:
        mtbf_seconds: mean time between failures of the whole job.
        first: seconds before the first save, whose cost nobody knows yet; early, so that a place that cannot be
            written to shows early.
        least: never save more often than this, seconds.
        most: never lose more than this, seconds.
    """

    def __init__(self, mtbf_seconds: float, first: float = 60.0, least: float = 10.0, most: float = 3600.0) -> None:
        young_daly(0.0, mtbf_seconds)  # refuses what is impossible
        self._mtbf = mtbf_seconds
        self._first = first
        self._least = least
        self._most = most
        self._cost: float | None = None
        self._written = 0.0

    @property
    def cost_seconds(self) -> float | None:
        """Measured cost of a save, the latest counting most; ``None`` before the first."""
        return self._cost

    @property
    def seconds(self) -> float:
        """Training time between two saves."""
        if self._cost is None:
            return self._first
        # A save that begins while the one before is still being written would wait for it.
        least = max(self._least, 2 * self._written)
        return max(least, min(self._most, young_daly(self._cost, self._mtbf)))

    def saved(self, cost_seconds: float, written_seconds: float = 0.0) -> None:
        """Learn from a save.

        Args:
            cost_seconds: how long training stood still.
            written_seconds: how long writing went on in the background after that; 0 if it did not.
        """
        self._cost = cost_seconds if self._cost is None else (self._cost + cost_seconds) / 2
        self._written = written_seconds


class TimedSteps:
    """Tells at which steps a save is due by the clock, the same on every rank, without asking at every step.

    The ranks agree on the next step at which they look at the clock again. It is estimated from the time that steps
    take, and at most doubles the steps done since the last save, so that slow first steps mislead nobody for long: the
    number of collectives between two saves grows with the logarithm of the steps.

    Args:
        seconds: time between two saves; asked at every look, on the first rank only.
        agree: gives every rank the first rank's answer, a collective.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        seconds: Callable[[], float],
        agree: Callable[[_Answer], _Answer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._agree = agree
        self._clock = clock
        self._begin_step = 0
        self._begin_time = 0.0
        self._look_at = 0

    def restart(self, step: int) -> None:
        """Count from here: training begins, or a save has been made."""
        self._begin_step, self._begin_time = step, self._clock()
        self._look_at = step + 1

    def is_due(self, step: int) -> bool:
        """Whether to save after ``step``; a collective when it is time to look, and free otherwise."""
        if step < self._look_at:
            return False
        due, self._look_at = self._agree(self._answer(step))
        return due

    def is_overdue(self) -> bool:
        """Whether the time between two saves has passed by this rank's clock; never a collective."""
        return self._clock() - self._begin_time >= self._seconds()

    def _answer(self, step: int) -> _Answer:
        elapsed, steps = self._clock() - self._begin_time, step - self._begin_step
        per_step = elapsed / steps
        remaining = self._seconds() - elapsed
        if remaining <= per_step / 2:
            return True, step + 1
        until_due = int(remaining / max(per_step, 1e-9))
        return False, step + max(1, min(until_due, steps))
