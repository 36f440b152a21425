"""In-memory copies of the run state, made at step boundaries."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trainwright.checkpoint.memory.snapshots import Snapshots
from trainwright.checkpoint.write.interval import AutoInterval
from trainwright.core.run.phases import DATA

# Upper bound on the optimizer steps that a rollback loses.
_MOST_STEPS = 1000


class StateCopies:
    """In-memory copies of this rank's run state, made while requested; ``trainer.copies``.

    A copy is a collective, made at the first micro-batch of an optimizer step, when the step before is complete,
    validation included. All requests share the copies: the most that one keeps, at an interval for all failures
    together.

    Args:
        trainer: whose state is copied.

    Attributes:
        snapshots: the copies.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.snapshots = Snapshots()
        self._is_own = True
        self._end: Callable[[], None] | None = None
        self._schedule = CopySchedule()
        self._step = -1  # the last step that began
        self._next = 0
        # Step of this run's last copy; given memory may hold copies that differ between ranks.
        self._copied: int | None = None

    def request(
        self,
        *,
        keep: int = 2,
        mtbf: float | None = None,
        every_n_steps: int | None = None,
        at_once: bool = False,
        memory: Snapshots | None = None,
    ) -> None:
        """Request copies until training ends. Call at the start of training, with equal arguments on every rank.

        Args:
            keep: minimum number of copies kept.
            mtbf: mean hours between failures that need them: they are made at the interval that minimizes lost time
                (``young_daly``); ``None``: off.
            every_n_steps: maximum optimizer steps between copies; ``None``: off.
            at_once: copy before the first step too; ``False``: first after it, when optimizers have a state.
            memory: holds the copies beyond training; ``None``: they are released then.
        """
        if memory is not None:
            self.snapshots, self._is_own = memory, False
        self.snapshots.keep_at_least(keep)
        if self._end is None:
            step = self._trainer.global_step
            self._step, self._next = step, step + 1
            self._end = self._trainer.phases.listen(self._hear)
        if at_once:
            self._step, self._next = -1, self._trainer.global_step
        self._schedule.add(mtbf, every_n_steps)

    def take(self) -> None:
        """Copy now, unless done at this step; call at a step boundary. A collective."""
        step = self._trainer.global_step
        if step == self._copied:
            return
        self._copied = step
        begin = time.perf_counter()
        checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        self.snapshots.take(self._trainer.strategy.run_state(checkpoint, complete=True), step)
        self._schedule.record(step, begin, time.perf_counter())

    def rolled_back(self) -> None:
        """Drop copies of steps that a rollback has undone."""
        self._step = self._trainer.global_step
        self._copied = None
        self.snapshots.forget_after(self._step)
        self._schedule.pause()
        self._next = self._step + self._steps_to_next()

    def stop(self) -> None:
        """Stop copying; release the memory unless it was given."""
        if self._end is not None:
            self._end()
        if self._is_own:
            self.snapshots.release()
        self.snapshots, self._is_own = Snapshots(), True
        self._end, self._schedule, self._copied = None, CopySchedule(), None

    def _hear(self, phase: str) -> None:
        step = self._trainer.global_step
        if phase != DATA or step == self._step:
            return
        self._step = step
        if step >= self._next:
            self.take()
            self._next = step + self._steps_to_next()

    def _steps_to_next(self) -> int:
        """Return the optimizer steps to the next copy: the maximum over ranks."""
        wanted = torch.tensor([self._schedule.steps_to_next()])
        if self._schedule.interval is not None and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=self._trainer.agreement_group())
        return max(1, math.ceil(wanted.item()))


class CopySchedule:
    """One rank's number of optimizer steps between copies.

    Attributes:
        interval: seconds between copies, with which ranks must agree on steps; ``None``: no clock counts.
    """

    def __init__(self) -> None:
        self._failures_per_second = 0.0
        self._every = _MOST_STEPS
        self.interval: AutoInterval | None = None
        self._last: tuple[int, float] | None = None  # step and end time of the last copy
        self._per_step = 0.0
        self._copies = 0

    def add(self, mtbf: float | None, every_n_steps: int | None) -> None:
        """Add a request, see :meth:`StateCopies.request`."""
        if mtbf is not None:
            self._failures_per_second += 1 / (3600 * mtbf)
            # The cost is unknown before the second copy, which is made at once.
            self.interval = AutoInterval(1 / self._failures_per_second, first=0.0, least=0.0)
        if every_n_steps is not None:
            self._every = min(self._every, every_n_steps)

    def record(self, step: int, begin: float, end: float) -> None:
        """Record a copy of ``step``, made from ``begin`` to ``end`` in seconds."""
        if self._last is not None and step > self._last[0]:
            self._per_step = (begin - self._last[1]) / (step - self._last[0])
        self._last = (step, end)
        self._copies += 1
        if self.interval is not None and self._copies > 1:  # the first one also allocates
            self.interval.saved(end - begin)

    def pause(self) -> None:
        """Ignore the time until the next copy, which is not that of steps."""
        self._last = None

    def steps_to_next(self) -> float:
        """Return the number of steps, 0 or more."""
        if self.interval is None:
            return float(self._every)
        seconds = self.interval.seconds
        return min(float(self._every), seconds / self._per_step) if self._per_step > 0 else 1.0
