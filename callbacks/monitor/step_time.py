"""Breakdown of the time of a step."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer

from trainwright.callbacks.monitor.hook_phases import phases_of
from trainwright.callbacks.monitor.records import emit
from trainwright.callbacks.step_clock import PhaseClock
from trainwright.callbacks.steps import log_metrics
from trainwright.callbacks.windows import Clocked, Windowed
from trainwright.core.run.phases import AGREEMENT, BACKWARD, DATA, FORWARD, HOOKS, IDLE, OPTIMIZER, SAVING, Phases

PARTS = ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "other")
"""Parts of a step, in reporting order."""
# Validation and certificates are not part of a step.
_PART_OF = {
    DATA: "data",
    FORWARD: "forward",
    BACKWARD: "backward",
    OPTIMIZER: "optimizer",
    SAVING: "checkpoint",
    HOOKS: "other",
    IDLE: "other",
    AGREEMENT: "communication",
}
# Parts whose waits are split off; an agreement is all waiting, and saving counts as saving.
_WITH_WAITS = ("data", "forward", "backward", "optimizer", "other")


class StepTime(Clocked[PhaseClock], Windowed):
    """Log the seconds of an optimizer step by part, averaged over windows of steps.

    The parts add up to the step time: ``data`` (until the next batch arrives), ``forward``, ``backward``,
    ``communication`` (exposed: the time this rank waits), ``optimizer``, ``checkpoint`` (while it blocks training) and
    ``other`` (hooks, logging, the loop, time between epochs). Validation and certificates are not part of a step.

    Logged are ``time/<part>`` and ``time/step`` of rank 0; every rank emits a ``step`` record. No communication; the
    device is synchronized only at the end of a window. The first step of a run (compilation, warm-up) gets a record of
    its own and is not logged. On CUDA all times are those of the compute stream.

    With Lightning's own Trainer parts come from hooks and the host clock: time between hooks is ``data``. With
    Lightning's own strategies waits belong to the part they occur in. In a pipeline, backward of the stages is
    ``backward`` and the rest of the step ``forward``.

    Args:
        every_n_steps: optimizer steps of a window; ``None``: the Trainer's ``log_every_n_steps`` (where 0 is off).

    Attributes:
        latest: seconds of a step by part in the last window, and in total as ``step``; empty before the first.
    """

    _warm_up = 1
    _phases: Phases

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self.latest: dict[str, float] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the source of phases."""
        if stage == "fit":
            self._phases = phases_of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring."""
        self._stop()
        super().on_train_start(trainer, pl_module)
        if self._window:
            self._clock = PhaseClock(trainer, self._phases, _PART_OF, begins_as="other")
            self._clock.split_pipeline(trainer.strategy)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a new window; time spent on undone steps is dropped."""
        super().on_gone_back(trainer, pl_module)
        if self._clock is not None:
            self._done = 0
            self._clock.spent_and_waited(wait_for_device=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report an incomplete window."""
        self._report_rest(trainer)
        self._stop()

    def _begin(self, trainer: Trainer, step: int) -> None:
        self._emit(trainer, step, 1)

    def _report(self, trainer: Trainer, step: int) -> None:
        seconds, done = self._emit(trainer, step, self._done), self._done
        self.latest = {part: value / done for part, value in seconds.items()}
        self.latest["step"] = sum(seconds.values()) / done
        log_metrics(trainer, {f"time/{name}": value for name, value in self.latest.items()}, step)
        self._running_clock.refresh()

    def _emit(self, trainer: Trainer, step: int, steps: int) -> dict[str, float]:
        seconds = parts_of(*self._running_clock.spent_and_waited(wait_for_device=True))
        emit(trainer, "step", {"seconds": seconds, "total": sum(seconds.values()), "steps": steps}, step + 1)
        return seconds


def parts_of(spent: dict[str, float], waited: dict[str, float]) -> dict[str, float]:
    """Return seconds by part, which add up to all time spent except validation.

    Args:
        spent: by part, waits included.
        waited: time spent waiting for other ranks, by part.
    """
    # A wait measured by another thread may exceed its part.
    waits = {part: min(waited.get(part, 0.0), spent.get(part, 0.0)) for part in _WITH_WAITS}
    seconds = {part: spent.get(part, 0.0) - waits.get(part, 0.0) for part in PARTS}
    seconds["communication"] += sum(waits.values())
    return seconds
