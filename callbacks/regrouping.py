"""Copies of the state at the boundaries of steps, and leaving there together: for runs whose replicas come and go."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from trainwright.checkpoint.snapshots import Snapshots

# What copying the state may cost of the time of training, at most.
_SHARE = 0.005
# The name of the phase with which a micro-batch begins.
_BEGINS = "data"


class Regroup(BaseException):
    """The ranks leave this run of ``fit`` together, to go on as another number of ranks.

    Not an Exception: code that catches errors to go on must not go on.

    Args:
        step: optimizer steps done.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"regrouping after step {step}")
        self.step = step


class Regrouping(Callback):
    """Keeps copies of the run state in memory, and leaves when the ranks are called.

    Both happen where a micro-batch begins that is the first of an optimizer step, when everything of the step before is
    done, validation included. Copies are made so often that they cost half a percent of the time; the ranks agree on
    that with a small all-reduce at each copy. A copy is a collective.

    Args:
        snapshots: where the copies are kept.
        must_leave: step -> whether the ranks are called to leave after so many optimizer steps; asked at every step.
        tell_step: hears how many optimizer steps are done; called at every step.
    """

    def __init__(
        self, snapshots: Snapshots, must_leave: Callable[[int], bool], tell_step: Callable[[int], None]
    ) -> None:
        self._snapshots = snapshots
        self._must_leave = must_leave
        self._tell_step = tell_step
        self._end: Callable[[], None] | None = None
        self._step = -1
        self._next = 0
        self._since = (0.0, 0)  # time and step of the last copy

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen."""
        self._step, self._next = -1, trainer.global_step
        phases: Any = trainer.phases  # type: ignore[attr-defined]
        self._end = phases.listen(lambda phase: self._hear(phase, trainer))

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

    def _hear(self, phase: str, trainer: Trainer) -> None:
        if phase != _BEGINS or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self._tell_step(self._step)
        leaves = self._must_leave(self._step)
        if leaves or self._step >= self._next:
            self._copy(trainer)
        if leaves:
            raise Regroup(self._step)

    def _copy(self, trainer: Trainer) -> None:
        begin = time.perf_counter()
        before, self._since = self._since, (begin, self._step)
        strategy: Any = trainer.strategy
        content = strategy.run_state(trainer._checkpoint_connector.dump_checkpoint(weights_only=False), complete=True)
        self._snapshots.take(content, self._step)
        steps = self._step - before[1]
        per_step = (begin - before[0]) / steps if before[0] and steps > 0 else math.inf
        self._next = self._step + self._distance(trainer, time.perf_counter() - begin, per_step)

    def _distance(self, trainer: Trainer, cost: float, per_step: float) -> int:
        """Steps to the next copy, the same on every rank: by the dearest copy and the fastest step."""
        # One number that all ranks can take the largest of.
        wanted = torch.tensor([cost / per_step / _SHARE])
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            group: Any = trainer.agreement_group()  # type: ignore[attr-defined]
            dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=group)
        return max(1, math.ceil(wanted.item()))
