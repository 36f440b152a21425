"""Copies of the run state in memory, made where optimizer steps begin, for whoever goes back or on from there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trainwright.checkpoint.memory.snapshots import Snapshots
from trainwright.checkpoint.write.interval import AutoInterval
from trainwright.core.run.phases import DATA, Phases

# Whatever copies cost, going back never loses more optimizer steps.
_MOST_STEPS = 1000


class CopiedTrainer(Protocol):
    """What copies ask of the Trainer whose state they hold."""

    _checkpoint_connector: Any

    @property
    def phases(self) -> Phases: ...

    @property
    def global_step(self) -> int: ...

    @property
    def strategy(self) -> Any: ...

    def agreement_group(self) -> dist.ProcessGroup | None: ...


class StateCopies:
    """Keeps copies of the run state in this rank's memory as long as somebody wants them; ``trainer.copies``.

    A copy is made where a micro-batch begins that is the first of an optimizer step, when everything of the step before
    is done, validation included. It is a collective. All who want copies share them: the memory is that of one who
    keeps most, and the interval serves the failures of all together.

    Args:
        trainer: whose state is copied.
        clock: seconds that only grow.
    """

    def __init__(self, trainer: CopiedTrainer, clock: Callable[[], float] = time.perf_counter) -> None:
        self._trainer = trainer
        self._clock = clock
        self._snapshots = Snapshots()
        self._is_own = True
        self._end: Callable[[], None] | None = None
        self._schedule = CopySchedule()
        self._step = -1  # the last one whose beginning was heard of
        self._next = 0
        # Step of the last copy of this run; what memory holds that was brought along may differ from rank to rank.
        self._copied: int | None = None

    @property
    def snapshots(self) -> Snapshots:
        """The copies."""
        return self._snapshots

    def want(
        self,
        *,
        keep: int = 2,
        mtbf: float | None = None,
        every_n_steps: int | None = None,
        at_once: bool = False,
        memory: Snapshots | None = None,
    ) -> None:
        """Ask for copies until training ends. To be called at the start of training, alike on every rank.

        Args:
            keep: how many, at least.
            mtbf: hours between two failures after which they are needed: they are made as often as loses least time, by
                Young's and Daly's formula (``young_daly``) from what they cost;
                ``None``: off.
            every_n_steps: optimizer steps from one copy to the next, at most; ``None``: off.
            at_once: copy before the first step as well; ``False``: first after it, when optimizers have a state.
            memory: where copies are kept, beyond the end of training; ``None``: in memory that is given back then.
        """
        if memory is not None:
            self._snapshots, self._is_own = memory, False
        self._snapshots.keep_at_least(keep)
        if self._end is None:
            step = self._trainer.global_step
            self._step, self._next = step, step + 1
            self._end = self._trainer.phases.listen(self._hear)
        if at_once:
            self._step, self._next = -1, self._trainer.global_step
        self._schedule.add(mtbf, every_n_steps)

    def take(self) -> None:
        """Copy now, unless that was done at this step; to be called where a step begins. A collective."""
        step = self._trainer.global_step
        if step == self._copied:
            return
        self._copied = step
        begin = self._clock()
        strategy: Any = self._trainer.strategy
        checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        self._snapshots.take(strategy.run_state(checkpoint, complete=True), step)
        self._schedule.took(step, begin, self._clock())

    def gone_back(self) -> None:
        """Hear that training went back to an earlier step: copies of later ones will be made anew."""
        self._step = self._trainer.global_step
        self._copied = None
        self._snapshots.forget_after(self._step)
        self._schedule.pause()
        self._next = self._step + self._steps_to_next()

    def stop(self) -> None:
        """Copy no more; memory that nobody brought along is given back."""
        if self._end is not None:
            self._end()
        if self._is_own:
            self._snapshots.release()
        self._snapshots, self._is_own = Snapshots(), True
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
        """Optimizer steps to the next copy, the same on every rank: by the dearest copy and the fastest step."""
        wanted = torch.tensor([self._schedule.steps_to_next()])
        if self._schedule.is_timed and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=self._trainer.agreement_group())
        return max(1, math.ceil(wanted.item()))


class CopySchedule:
    """How many optimizer steps one rank would let pass from one copy to the next."""

    def __init__(self) -> None:
        self._failures_per_second = 0.0
        self._every = _MOST_STEPS
        self._interval: AutoInterval | None = None
        self._last: tuple[int, float] | None = None  # step, and when the copy of it was complete
        self._per_step = 0.0
        self._copies = 0

    @property
    def is_timed(self) -> bool:
        """Whether it depends on a clock, so that ranks must agree."""
        return self._interval is not None

    def add(self, mtbf: float | None, every_n_steps: int | None) -> None:
        """Serve one more who wants copies, see :meth:`StateCopies.want`."""
        if mtbf is not None:
            self._failures_per_second += 1 / (3600 * mtbf)
            # Nothing is known of the cost before the second copy; it is made at once.
            self._interval = AutoInterval(1 / self._failures_per_second, first=0.0, least=0.0)
        if every_n_steps is not None:
            self._every = min(self._every, every_n_steps)

    def took(self, step: int, begin: float, end: float) -> None:
        """A copy was made, which took from ``begin`` to ``end``, in seconds."""
        if self._last is not None and step > self._last[0]:
            self._per_step = (begin - self._last[1]) / (step - self._last[0])
        self._last = (step, end)
        self._copies += 1
        if self._interval is not None and self._copies > 1:  # the first one also makes the memory
            self._interval.saved(end - begin)

    def pause(self) -> None:
        """What follows until the next copy tells nothing of the time that steps take."""
        self._last = None

    def steps_to_next(self) -> float:
        """A number of steps, 0 or more."""
        if self._interval is None:
            return float(self._every)
        seconds = self._interval.seconds
        return min(float(self._every), seconds / self._per_step) if self._per_step > 0 else 1.0
