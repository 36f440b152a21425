"""Leaving a run at a step boundary, all ranks together, when the number of replicas changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from trainwright.callbacks.windows import Listening
from trainwright.checkpoint.memory.snapshots import Snapshots
from trainwright.core.run.phases import DATA


class Regroup(BaseException):
    """Raised on all ranks to leave ``fit`` and continue with another world size.

    Not an ``Exception``, so that error handlers do not swallow it.

    Args:
        step: optimizer steps done.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"regrouping after step {step}")
        self.step = step


@dataclass(eq=False, repr=False)
class Regrouping(Listening):
    """Keeps in-memory copies of the run state, and leaves at a step boundary on request, with a copy of that step.

    Args:
        snapshots: holds the copies.
        mtbf: mean hours between failures of the whole job, which sets the copy interval, see
            :class:`~trainwright.callbacks.guard.copies.StateCopies`.
        must_leave: step -> whether the ranks must leave after it; called at every step.
        tell_step: receives the optimizer steps done; called at every step.
    """

    snapshots: Snapshots
    mtbf: float
    must_leave: Callable[[int], bool]
    tell_step: Callable[[int], None]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start listening to phases."""
        self._step = -1
        ours: Any = trainer
        ours.copies.request(mtbf=self.mtbf, at_once=True, memory=self.snapshots)
        self._end_listening = ours.phases.listen(lambda phase: self._hear(phase, ours))

    def _hear(self, phase: str, trainer: Any) -> None:
        if phase != DATA or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self.tell_step(self._step)
        if self.must_leave(self._step):
            trainer.copies.take()
            raise Regroup(self._step)
