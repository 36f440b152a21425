"""Time spent by a rank in the phases of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from trainwright.core.run.phases import BACKWARD, DATA, FORWARD, HOOKS, OPTIMIZER, Phases
from trainwright.core.run.spans import Spans

# Phases that are counted; others (validation) are not part of a step.
_KIND_OF = {DATA: "data", FORWARD: "compute", BACKWARD: "compute", OPTIMIZER: "compute", HOOKS: "hooks"}
KINDS = ("compute", "data", "hooks")


class PhaseClock:
    """Accumulates time by kind of phase until it is stopped.

    Args:
        trainer: its strategy measures waits (``Waits``) and supplies the clock; with a Lightning strategy the host
            clock is used and no waits are known.
        phases: of that Trainer.
        kind_of: phase -> kind; other phases count as ``""``.
        begins_as: kind until the first phase begins.
    """

    def __init__(self, trainer: Any, phases: Phases, kind_of: Mapping[str, str], begins_as: str) -> None:
        measures = getattr(trainer.strategy, "measures", None)
        self._waits: Any = _no_waits() if measures is None else measures.measure_waits()
        self._spans: Spans = self._waits.new_spans()
        self._kind_of = kind_of
        self._kind = self._waits.kind = begins_as
        self._since = self._spans.mark()
        self._interrupted = begins_as
        self._ends: list[Callable[[], None]] = [phases.listen(self.begin)]

    def split_pipeline(self, strategy: Any) -> None:
        """Count the backward passes of pipeline stages as backward; the loop sees them as forward."""
        measures = getattr(strategy, "measures", None)
        if measures is not None:
            self._ends.append(measures.listen_to_stages(self))

    def stage_begins(self, what: str, micro_batch: int, stage: int) -> None:
        """See :class:`~trainwright.strategies.contract.waits.timeline.StageListener`."""
        if what != FORWARD:
            self._interrupted = self._kind
            self.begin(BACKWARD)

    def stage_ends(self, what: str, micro_batch: int, stage: int) -> None:
        """See :class:`~trainwright.strategies.contract.waits.timeline.StageListener`."""
        if what != FORWARD:
            self._turn(self._interrupted)

    def stop(self) -> None:
        """Stop measuring."""
        for end in self._ends:
            end()
        self._waits.stop()

    def refresh(self) -> None:
        """See :meth:`~trainwright.strategies.contract.waits.waiting.Waits.refresh`."""
        self._waits.refresh()

    def begin(self, phase: str) -> None:
        """End the current phase and begin another."""
        self._turn(self._kind_of.get(phase, ""))

    def spent_and_waited(self, wait_for_device: bool = False) -> tuple[dict[str, float], dict[str, float]]:
        """Return seconds by kind since the last call, waits included, and of these the seconds spent waiting.

        Args:
            wait_for_device: synchronize first; else unfinished device work is reported by the next call.
        """
        self._turn(self._kind)
        if wait_for_device:
            self._spans.settle()
        return self._spans.take(), self._waits.spans.take()

    def _turn(self, kind: str) -> None:
        now = self._spans.mark()
        self._spans.add(self._kind, self._since, now)
        self._kind, self._since = kind, now
        self._waits.kind = kind


def _no_waits() -> Any:
    """Return the interface of ``Waits``, for strategies that measure none."""
    return SimpleNamespace(kind="", spans=Spans(), new_spans=Spans, refresh=lambda: None, stop=lambda: None)


class StepClock(PhaseClock):
    """Accumulates compute, data, hook and wait time of steps."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer, trainer.phases, _KIND_OF, begins_as="hooks")

    def take(self, wait_for_device: bool = False) -> list[float]:
        """Return seconds of compute, data, hooks and waits since the last call; see :meth:`spent_and_waited`."""
        spent, waited = self.spent_and_waited(wait_for_device)
        own = [max(spent.get(kind, 0.0) - waited.get(kind, 0.0), 0.0) for kind in KINDS]
        return [*own, sum(waited.get(kind, 0.0) for kind in KINDS)]
