"""Verdicts of a callback on the optimizer step about to be made.

A verdict is raised in ``on_before_optimizer_step``, when gradients are complete and nothing has changed, at the same
step on every rank; only ``trainwright.Trainer`` handles it. Callbacks with a method ``on_gone_back`` are notified of a
rollback.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Checkpoint

from trainwright.checkpoint.memory.snapshots import Snapshot


class Verdict(BaseException):
    """Base of verdicts. Not an ``Exception``, so that error handlers do not swallow it."""


class DropStep(Verdict):
    """Drop the step: parameters and optimizer state stay as they are.

    A dropped step does not count: ``global_step`` and schedulers stay, and its samples are recorded as skipped.
    ``on_train_batch_end`` is called as after any batch.
    """


class RollBack(Verdict):
    """Roll back to an in-memory snapshot, in the same process.

    Args:
        held: this rank's part of it, of the same step on every rank.
        skip_steps: optimizer steps, from the current one on, whose samples are read but not trained on, and recorded as
            skipped; at most to the end of the epoch. 0: none.
    """

    def __init__(self, held: Snapshot, skip_steps: int = 0) -> None:
        super().__init__(held, skip_steps)
        self.held = held
        self.skip_steps = skip_steps


def notify_rollback(trainer: Any) -> None:
    """Call ``on_gone_back`` of every callback that has it; the earlier state and ``global_step`` are in place."""
    for callback in trainer.callbacks:
        if hasattr(callback, "on_gone_back"):
            callback.on_gone_back(trainer, trainer.lightning_module)


def keeps_its_state(callback: object) -> bool:
    """Return whether a rollback leaves a callback's state as it is.

    True for callbacks that save checkpoints, which still exist, and with ``keeps_its_state = True``.
    """
    return isinstance(callback, Checkpoint) or bool(getattr(callback, "keeps_its_state", False))
