"""Schedule of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trainwright.checkpoint.write.interval import AutoInterval, TimedSteps


@dataclass
class SaveSchedule:
    """The steps and epochs to save after, equal on every rank.

    Args:
        every: ``"auto"``: the interval that minimizes lost time, see ``young_daly``, unless another one is given;
            ``None``: off.
        every_n_steps: optimizer steps; ``None``: off.
        every_n_seconds: by the clock of rank 0; ``None``: off.
        every_n_epochs: epochs; ``None``: off.
        mtbf: mean hours between failures of the whole job, for ``"auto"``.
    """

    every: Literal["auto"] | None
    every_n_steps: int | None
    every_n_seconds: float | None
    every_n_epochs: int | None
    mtbf: float

    def __post_init__(self) -> None:
        given = [self.every_n_steps, self.every_n_seconds, self.every_n_epochs]
        is_auto = self.every == "auto" and all(interval is None for interval in given)
        self._auto = AutoInterval(self.mtbf * 3600) if is_auto else None
        self._timed: TimedSteps | None = None
        self._saved_at = 0

    @property
    def interval_seconds(self) -> float | None:
        """Current seconds between saves; ``None`` if saves do not depend on the clock."""
        return self._auto.seconds if self._auto is not None else self.every_n_seconds

    def start(self, step: int, agree: Callable[[tuple[bool, int]], tuple[bool, int]]) -> None:
        """Start counting.

        Args:
            step: step that training starts after.
            agree: returns rank 0's answer on every rank, a collective.
        """
        self._timed = None
        if self.interval_seconds is not None:
            self._timed = TimedSteps(lambda: self.interval_seconds or 0.0, agree)
        self.restart(step)

    def restart(self, step: int) -> None:
        """Count from a save at ``step``."""
        self._saved_at = step
        if self._timed is not None:
            self._timed.restart(step)

    def record_cost(self, blocked_seconds: float, written_seconds: float) -> None:
        """Record how long a save blocked training, and how long it was written in the background."""
        if self._auto is not None:
            self._auto.saved(blocked_seconds, written_seconds)

    def is_due_after_step(self, step: int) -> bool:
        """Return whether to save after an optimizer step. Occasionally a collective if the clock decides."""
        return self.is_due_by_number(step) or (self._timed is not None and self._timed.is_due(step))

    def is_due_by_number(self, step: int) -> bool:
        """Return whether a save is due after an optimizer step by its number; never a collective."""
        # Not `step % n == 0`: with several optimizers the number grows by more than one per step.
        every = self.every_n_steps
        return every is not None and step // every > self._saved_at // every

    def is_overdue(self, step: int) -> bool:
        """Return whether a save is due by the number or by this rank's clock; never a collective."""
        return self.is_due_by_number(step) or (self._timed is not None and self._timed.is_overdue())

    def is_due_after_epoch(self, epoch: int) -> bool:
        """Return whether to save after the given epoch, counted from 0."""
        return self.every_n_epochs is not None and (epoch + 1) % self.every_n_epochs == 0
