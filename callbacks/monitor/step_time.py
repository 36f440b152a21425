"""For what the time of a step is spent."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer

from trainwright.callbacks.monitor.hook_phases import phases_of
from trainwright.callbacks.monitor.records import tell
from trainwright.callbacks.step_clock import PhaseClock
from trainwright.callbacks.steps import log_metrics
from trainwright.callbacks.windows import Measuring, Windowed
from trainwright.core.run.phases import AGREEMENT, BACKWARD, DATA, FORWARD, HOOKS, IDLE, OPTIMIZER, SAVING, Phases

PARTS = ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "other")
"""Of a step, in the order in which they are told."""
# Validation is no part of a step.
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
# Of these phases waits are told apart: an agreement is nothing else, and who saves is saving.
_WITH_WAITS = ("data", "forward", "backward", "optimizer", "other")


class StepTime(Measuring, Windowed):
    """Log the seconds of an optimizer step by what they were spent for, averaged over windows of steps.

    The parts, which add up to the time of the step: ``data`` (until the next batch is there), ``forward``,
    ``backward``, ``communication`` (as far as this rank waits for it: what other work hides is not in it),
    ``optimizer``, ``checkpoint`` (as long as training stands still for it) and ``other`` (hooks of callbacks and the
    module, logging, the loop itself, what lies between two epochs). Validation is no part of a step.

    Logged are ``time/<part>`` and ``time/step`` of rank 0; every rank tells a record ``step``. Nothing is communicated.
    The device is waited for at the end of a window only. The first step of a run (which compiles, and warms caches) is
    told as a record of its own and not logged. On CUDA all times are those of the stream that computes.

    With a Trainer of Lightning's own, parts are as its hooks show them by the clock of the host: what its loop does
    between two of them is in ``data``, and so are checkpoints. With a strategy of Lightning's own, what is waited for
    others is in the part in which it is. A pipeline mixes forward and backward of micro-batches: what its stages do
    backward is ``backward``, the rest of its step ``forward``.

    Args:
        every_n_steps: optimizer steps of a window; ``None``: the Trainer's ``log_every_n_steps`` (there, 0 is off).

    Raises:
        ValueError: if ``every_n_steps`` is less than 1.
    """

    # A strategy may have the weights of a step on their way while this one is called.
    looks_at_parameters = False

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self.latest: dict[str, float] = {}
        """Seconds of a step by part in the last window, and of all of it as ``step``; empty before the first."""
        self._done = 0  # steps of this window
        self._is_first = True
        self._phases: Phases | None = None
        self._clock: PhaseClock | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find who tells of phases."""
        if stage == "fit":
            self._phases = phases_of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure."""
        super().on_train_start(trainer, pl_module)
        self._stop()
        if not self._window:
            return
        assert self._phases is not None
        self._done, self._is_first = 0, True
        self._clock = PhaseClock(trainer, self._phases, _PART_OF, begins_as="other")
        self._clock.split_pipeline(trainer.strategy)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """At the end of a window, tell."""
        if self._clock is None:
            return
        step = self._steps.ended(trainer)
        if step is None:
            return
        self._done += 1
        if self._is_first or self._ends_window(step):
            self._tell(trainer, step)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a window anew: what was spent on steps that are made again is told by no step."""
        super().on_gone_back(trainer, pl_module)
        self._done = 0
        if self._clock is not None:
            self._clock.spent_and_waited(wait_for_device=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell of what is left of a window."""
        if self._clock is not None and self._done:
            self._tell(trainer, self._steps.next_number(trainer) - 1)
        self._stop()

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.stop()
            self._clock = None

    def _tell(self, trainer: Trainer, step: int) -> None:
        assert self._clock is not None
        seconds = parts_of(*self._clock.spent_and_waited(wait_for_device=True))
        total, done = sum(seconds.values()), self._done
        tell(trainer, "step", {"seconds": seconds, "total": total, "steps": done}, step + 1)
        self._done = 0
        if self._is_first:
            self._is_first = False
            return
        self.latest = {part: value / done for part, value in seconds.items()} | {"step": total / done}
        log_metrics(trainer, {f"time/{name}": value for name, value in self.latest.items()}, step)
        self._clock.refresh()


def parts_of(spent: dict[str, float], waited: dict[str, float]) -> dict[str, float]:
    """Seconds by part; they add up to all that was spent, but for validation.

    Args:
        spent: by part, waits included.
        waited: of these, what was waited for other ranks.
    """
    # A wait that another thread has measured may be longer than what it lies in.
    apart = {part: min(waited.get(part, 0.0), spent.get(part, 0.0)) for part in _WITH_WAITS}
    seconds = {part: spent.get(part, 0.0) - apart.get(part, 0.0) for part in PARTS}
    seconds["communication"] += sum(apart.values())
    return seconds
