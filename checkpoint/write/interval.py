"""Intervals between checkpoints that balance lost work against the cost of saving."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# (is due, step of the next check). A check costs one small collective, so checking early is cheap.
_Answer = tuple[bool, int]


def young_daly(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return the seconds of training between two saves that minimize time lost to saving and to repeated work.

    ``sqrt(2 C M)`` is Young's first-order optimum (J. W. Young, "A first order approximation to the optimum checkpoint
    interval", CACM 17(9), 1974). Daly's higher-order estimate corrects it where saving is not short against the time
    between failures (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS
    22(3), 2006, equation 37): ``sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C``, and ``M`` where ``C >= 2M``.

    Args:
        cost_seconds: C, how long one save blocks training.
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
    """Young's and Daly's interval for the save cost measured during a run.

    Args:
        mtbf_seconds: mean time between failures of the whole job.
        first: seconds before the first save, whose cost is unknown; short, so that an unwritable folder shows early.
        least: shortest interval, seconds.
        most: longest interval, seconds.
    """

    def __init__(self, mtbf_seconds: float, first: float = 60.0, least: float = 10.0, most: float = 3600.0) -> None:
        young_daly(0.0, mtbf_seconds)  # validates
        self._mtbf = mtbf_seconds
        self._first = first
        self._least = least
        self._most = most
        self._cost: float | None = None  # weighted towards the latest save
        self._written = 0.0

    @property
    def seconds(self) -> float:
        """Training time between two saves."""
        if self._cost is None:
            return self._first
        # A save would wait for the previous one to be written.
        least = max(self._least, 2 * self._written)
        return max(least, min(self._most, young_daly(self._cost, self._mtbf)))

    def saved(self, cost_seconds: float, written_seconds: float = 0.0) -> None:
        """Update the cost from a save.

        Args:
            cost_seconds: how long it blocked training.
            written_seconds: how long it was written in the background after that; 0 if synchronous.
        """
        self._cost = cost_seconds if self._cost is None else (self._cost + cost_seconds) / 2
        self._written = written_seconds


class TimedSteps:
    """Schedule of saves by the clock at the same steps on every rank, without communicating at every step.

    The ranks agree on the next step at which they check the clock. It is estimated from the time per step, and at most
    doubles the steps since the last save, so that slow first steps do not mislead for long: the number of collectives
    between two saves grows with the logarithm of the steps.

    Args:
        seconds: returns the time between two saves; called at every check, on the first rank only.
        agree: broadcasts the first rank's answer, a collective.
        clock: monotonic seconds.
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
        """Restart the interval: training begins, or a save was made."""
        self._begin_step, self._begin_time = step, self._clock()
        self._look_at = step + 1

    def is_due(self, step: int) -> bool:
        """Return whether to save after ``step``; a collective at steps that check the clock."""
        if step < self._look_at:
            return False
        due, self._look_at = self._agree(self._answer(step))
        return due

    def is_overdue(self) -> bool:
        """Return whether the interval has passed by this rank's clock; never a collective."""
        return self._clock() - self._begin_time >= self._seconds()

    def _answer(self, step: int) -> _Answer:
        elapsed, steps = self._clock() - self._begin_time, step - self._begin_step
        per_step = elapsed / steps
        remaining = self._seconds() - elapsed
        if remaining <= per_step / 2:
            return True, step + 1
        until_due = int(remaining / max(per_step, 1e-9))
        return False, step + max(1, min(until_due, steps))
