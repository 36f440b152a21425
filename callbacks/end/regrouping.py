"""Leaving a run where a step begins, all ranks together: for runs whose replicas come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from trainwright.checkpoint.memory.snapshots import Snapshots
from trainwright.core.run.phases import DATA


class Regroup(BaseException):
    """The ranks leave this run of ``fit`` together, to go on as another number of ranks.

    Not an Exception: code that catches errors to go on must not go on.

    Args:
        step: optimizer steps done.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"regrouping after step {step}")
        self.step = step


@dataclass(eq=False, repr=False)
class Regrouping(Callback):
    """Has copies of the run state kept in memory, and leaves when the ranks are called.

    It leaves where a micro-batch begins that is the first of an optimizer step, with a copy of that step.

    Args:
        snapshots: where the copies are kept.
        mtbf: hours between two failures of the whole job, from which follows how often copies are made, see
            :class:`~trainwright.callbacks.guard.copies.StateCopies`.
        must_leave: step -> whether the ranks are called to leave after so many optimizer steps; asked at every step.
        tell_step: hears how many optimizer steps are done; called at every step.
    """

    snapshots: Snapshots
    mtbf: float
    must_leave: Callable[[int], bool]
    tell_step: Callable[[int], None]

    def __post_init__(self) -> None:
        self._end: Callable[[], None] | None = None
        self._step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen."""
        self._step = -1
        ours: Any = trainer
        ours.copies.want(mtbf=self.mtbf, at_once=True, memory=self.snapshots)
        self._end = ours.phases.listen(lambda phase: self._hear(phase, ours))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen no more."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Listen no more."""
        self._stop()

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
            self._end = None

    def _hear(self, phase: str, trainer: Any) -> None:
        if phase != DATA or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self.tell_step(self._step)
        if self.must_leave(self._step):
            trainer.copies.take()
            raise Regroup(self._step)
