"""Optimizer steps as callbacks see them: when one has ended, which number it has in the logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer


class StepCounter:
    """Tells which ``on_train_batch_end`` ends an optimizer step.

    A micro-batch that only accumulates ends none. The answer is the same on every rank, because it depends on the
    loop's progress alone.
    """

    def __init__(self) -> None:
        self._seen = 0

    def start(self, trainer: Trainer) -> None:
        """Call in ``on_train_start``: a resumed run does not begin at 0."""
        self._seen = trainer.global_step

    def ended(self, trainer: Trainer) -> int | None:
        """Number of the optimizer step that this micro-batch ended, or ``None`` if it ended none.

        The number is Lightning's own for metrics of a step: 0 for the first, counted once per batch even with several
        optimizers.
        """
        if trainer.global_step == self._seen:
            return None
        self._seen = trainer.global_step
        return self.next_number(trainer)

    def next_number(self, trainer: Trainer) -> int:
        """Number of the optimizer step that is being made, or comes next."""
        return trainer.fit_loop.epoch_loop._batches_that_stepped


def steps_done(trainer: Trainer) -> int:
    """How many optimizer steps the run has made, one just made included; several optimizers count once."""
    several = len(trainer.optimizers) > 1
    return trainer.fit_loop.epoch_loop._batches_that_stepped if several else trainer.global_step


def is_dropped(trainer: Trainer) -> bool:
    """Whether the present micro-batch should have ended an optimizer step that was not made, see ``DropStep``."""
    return bool(getattr(trainer.fit_loop.epoch_loop, "dropped", False))


def window_steps(every_n_steps: int | None, trainer: Trainer) -> int:
    """Optimizer steps between two records: ``every_n_steps``, or the Trainer's ``log_every_n_steps``; 0 is off."""
    if every_n_steps is not None:
        return every_n_steps
    steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return steps


def require_window(every_n_steps: int | None, owner: object) -> None:
    """Refuse an impossible ``every_n_steps``.

    Raises:
        ValueError: if it is given and less than 1.
    """
    if every_n_steps is not None and every_n_steps < 1:
        raise ValueError(
            f"{type(owner).__name__}(every_n_steps={every_n_steps}) (allowed: 1 or more optimizer steps, "
            "or None for the Trainer's log_every_n_steps)"
        )


def require_strategy(owner: object, trainer: Any, method: str) -> None:
    """Refuse a strategy that is not of this project, and lacks what a callback asks for.

    Args:
        owner: the callback.
        trainer: of the run.
        method: that a strategy of this project has.

    Raises:
        ValueError: if the strategy has it not.
    """
    if not hasattr(trainer.strategy, method):
        raise ValueError(
            f"{type(owner).__name__} needs one of the strategies of trainwright, which know what ranks hold and send; "
            f"this is {type(trainer.strategy).__name__}. Type strategy='ddp', 'zero2', 'hybrid', ..., or leave it out."
        )


def log_metrics(trainer: Trainer, metrics: Mapping[str, float], step: int) -> None:
    """Write ``metrics`` of ``step`` to every logger of the Trainer; loggers themselves write on rank 0 only."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step)
