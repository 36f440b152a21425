"""When a checkpoint is due."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from trainwright.checkpoint.write.interval import AutoInterval, TimedSteps


class SaveSchedule:
    """Tells after which steps and epochs to save; the same on every rank.

    Args:
        every: ``"auto"``: as often as costs least, see ``young_daly``, unless one
            of the other intervals is given; ``None``: off.
        every_n_steps: optimizer steps; ``None``: off.
        every_n_seconds: by the clock of the first rank; ``None``: off.
        every_n_epochs: after the last batch of an epoch; ``None``: off.
        mtbf: hours between two failures of the whole job, for ``"auto"``.
    """

    def __init__(
        self,
        every: Literal["auto"] | None,
        every_n_steps: int | None,
        every_n_seconds: float | None,
        every_n_epochs: int | None,
        mtbf: float,
    ) -> None:
        self._every_n_steps = every_n_steps
        self._every_n_seconds = every_n_seconds
        self._every_n_epochs = every_n_epochs
        given = [every_n_steps, every_n_seconds, every_n_epochs]
        is_auto = every == "auto" and all(interval is None for interval in given)
        self._auto = AutoInterval(mtbf * 3600) if is_auto else None
        self._timed: TimedSteps | None = None
        self._saved_at = 0

    @property
    def interval_seconds(self) -> float | None:
        """Seconds between two saves now; ``None`` where the clock decides nothing."""
        return self._auto.seconds if self._auto is not None else self._every_n_seconds

    def start(self, step: int, agree: Callable[[tuple[bool, int]], tuple[bool, int]]) -> None:
        """Begin to count.

        Args:
            step: the step that training begins after.
            agree: gives every rank the first rank's answer, a collective.
        """
        self._timed = None
        if self.interval_seconds is not None:
            self._timed = TimedSteps(lambda: self.interval_seconds or 0.0, agree)
        self.restart(step)

    def restart(self, step: int) -> None:
        """A save was made at ``step``."""
        self._saved_at = step
        if self._timed is not None:
            self._timed.restart(step)

    def learn(self, blocked_seconds: float, written_seconds: float) -> None:
        """How long training stood still for a save, and how long writing went on behind it."""
        if self._auto is not None:
            self._auto.saved(blocked_seconds, written_seconds)

    def is_due_after_step(self, step: int) -> bool:
        """Whether to save after an optimizer step. Where the clock decides, now and then a collective."""
        return self.is_due_by_number(step) or (self._timed is not None and self._timed.is_due(step))

    def is_due_by_number(self, step: int) -> bool:
        """Whether to save after an optimizer step, whatever the clock says; never a collective."""
        # Not `step % n == 0`: with several optimizers the number grows by more than one at once.
        every = self._every_n_steps
        return every is not None and step // every > self._saved_at // every

    def is_overdue(self, step: int) -> bool:
        """Whether to save after ``step`` at the latest, by what this rank knows; never a collective."""
        return self.is_due_by_number(step) or (self._timed is not None and self._timed.is_overdue())

    def is_due_after_epoch(self, epoch: int) -> bool:
        """Whether to save after the epoch of that number, the first being 0."""
        return self._every_n_epochs is not None and (epoch + 1) % self._every_n_epochs == 0
