"""How far a loss is from those before it, in a measure that a few odd ones among them do not move."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

# Makes the median of absolute deviations an estimate of the standard deviation of normal numbers: 1 / Phi^-1(3/4).
_NORMAL = 1.4826


class LossHistory:
    """The losses of the last good optimizer steps.

    Args:
        window: how many steps are remembered.
        min_history: with fewer of them nothing is said about a loss.
    """

    def __init__(self, window: int, min_history: int) -> None:
        self._losses: deque[tuple[int, float]] = deque(maxlen=window)
        self._min_history = min_history

    def add(self, step: int, loss: float) -> None:
        """Remember the loss of a good step."""
        self._losses.append((step, loss))

    def forget_after(self, step: int) -> None:
        """Forget the steps after ``step``, which are made again."""
        self.restore([entry for entry in self._losses if entry[0] <= step])

    def restore(self, losses: Iterable[tuple[int, float]]) -> None:
        """Remember what :meth:`entries` gave, as far as it fits the window."""
        self._losses = deque(((int(step), float(loss)) for step, loss in losses), maxlen=self._losses.maxlen)

    def entries(self) -> list[tuple[int, float]]:
        """Steps and their losses, oldest first."""
        return list(self._losses)

    def jump(self, loss: float) -> tuple[float, float] | None:
        """How far ``loss`` lies above those before it; ``None`` while too few are remembered.

        Returns:
            The robust z-score, ``(loss - median) / (1.4826 MAD)`` (MAD: the median of the absolute deviations from the
            median; Iglewicz and Hoaglin, 1993), and ``(loss - median) / |median|``. Both are below 0 for a loss that is
            lower; infinite where what they are divided by is 0.
        """
        if len(self._losses) < self._min_history:
            return None
        losses = [each for _, each in self._losses]
        median = statistics.median(losses)
        spread = _NORMAL * statistics.median(abs(each - median) for each in losses)
        return _ratio(loss - median, spread), _ratio(loss - median, abs(median))


def _ratio(numerator: float, denominator: float) -> float:
    if denominator > 0:
        return numerator / denominator
    return 0.0 if numerator == 0 else math.copysign(math.inf, numerator)
