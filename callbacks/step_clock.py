"""For what a rank spends the time of its steps, as the Trainer's phases tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# What the phases that the Trainer tells of are counted as; others (validation) are no part of a step.
_KIND_OF = {"data": "data", "forward": "compute", "backward": "compute", "optimizer": "compute", "hooks": "hooks"}
KINDS = ("compute", "data", "hooks")


class StepClock:
    """Sums up for what the time is spent, as phases begin, until it is stopped.

    Args:
        trainer: whose phases it hears of; its strategy measures how long this rank waits
            (:class:`~trainwright.strategies.waiting.Waits`), which also tells the time.
    """

    def __init__(self, trainer: Any) -> None:
        self._waits = trainer.strategy.measure_waits()
        self._spans = self._waits.new_spans()
        self._kind = self._waits.kind = "hooks"
        self._since = self._spans.mark()
        self._end: Callable[[], None] = trainer.phases.listen(self.begin)

    def stop(self) -> None:
        """Measure no more."""
        self._end()
        self._waits.stop()

    def refresh(self) -> None:
        """See :meth:`~trainwright.strategies.waiting.Waits.refresh`."""
        self._waits.refresh()

    def begin(self, phase: str) -> None:
        """A phase begins, and so the one before ends."""
        self._turn(_KIND_OF.get(phase, ""))

    def take(self, wait_for_device: bool = False) -> list[float]:
        """Seconds of compute, data, hooks and waits since the last call.

        Args:
            wait_for_device: until the device has done all of it; else the next call tells of what it has not done yet.
        """
        self._turn(self._kind)
        if wait_for_device:
            self._spans.settle()
        spent, waited = self._spans.take(), self._waits.spans.take()
        own = [max(spent.get(kind, 0.0) - waited.get(kind, 0.0), 0.0) for kind in KINDS]
        return [*own, sum(waited.get(kind, 0.0) for kind in KINDS)]

    def _turn(self, kind: str) -> None:
        now = self._spans.mark()
        self._spans.add(self._kind, self._since, now)
        self._kind, self._since = kind, now
        self._waits.kind = kind
