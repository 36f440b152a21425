"""Optimizer steps as seen from callbacks: when one has ended, and its number in the logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer

from trainwright.core.run.traits import traits_of


def step_number(trainer: Trainer) -> int:
    """Return the number of the current optimizer step, or of the next one between steps.

    It is Lightning's for logged metrics: 0 first, one per batch even with several optimizers.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def steps_done(trainer: Trainer) -> int:
    """Return the optimizer steps done, including one just made; several optimizers count once."""
    return step_number(trainer) if len(trainer.optimizers) > 1 else trainer.global_step


def is_dropped(trainer: Trainer) -> bool:
    """Return whether this micro-batch would have ended an optimizer step that was dropped, see ``DropStep``."""
    return bool(getattr(trainer.fit_loop.epoch_loop, "dropped", False))


def are_synchronous(trainer: Any) -> bool:
    """Return whether all ranks are at the same optimizer step, so that any step may run a collective."""
    return traits_of(trainer.strategy).steps_are_collective


def require_strategy(owner: object, trainer: Any, method: str) -> None:
    """Raise a ``ValueError`` if the strategy lacks ``method``, as those of Lightning do, which ``owner`` needs."""
    if not hasattr(trainer.strategy, method):
        raise ValueError(
            f"{type(owner).__name__} does not support the strategy {type(trainer.strategy).__name__}: it needs one of "
            "trainwright. Type strategy='ddp', 'zero2', 'hybrid', ..., or leave the callback out."
        )


def log_metrics(trainer: Trainer, metrics: Mapping[str, float], step: int) -> None:
    """Log ``metrics`` of ``step`` to every logger of the Trainer (loggers write on rank 0 only)."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step)
