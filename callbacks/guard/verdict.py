"""What a callback may decide about the optimizer step that is about to be made, on every rank alike.

A verdict is raised in ``on_before_optimizer_step``, when the gradients are there and nothing has been changed by them
yet, at the same step on every rank, and is understood by ``trainwright.Trainer`` alone. Callbacks that keep something
of earlier steps, such as which step they saw last, are told of going back by :func:`tell_gone_back`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from trainwright.checkpoint.memory.snapshots import Snapshot


class Verdict(BaseException):
    """No error: what handles errors on the way to the loop (``except Exception``) must not take it for one."""


class DropStep(Verdict):
    """The step is not made: parameters and the optimizer's state stay as they are.

    A dropped step does not count: ``global_step`` and schedulers stay where they are, too, and its samples are recorded
    as skipped. ``on_train_batch_end`` is called as after any batch.
    """


class GoBack(Verdict):
    """Training goes on from a state in memory, in the same process.

    Args:
        held: this rank's part of it; that of one and the same step on every rank.
        skip_steps: how many optimizer steps, from the one that is about to be made on, are not trained on when they
            come again; their samples are read and recorded as skipped. At most to the end of the epoch. 0: none.
    """

    def __init__(self, held: Snapshot, skip_steps: int = 0) -> None:
        super().__init__(held, skip_steps)
        self.held = held
        self.skip_steps = skip_steps


@runtime_checkable
class GoesBack(Protocol):
    """A callback that wants to know when training has gone back."""

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The state of an earlier step is in place; ``trainer.global_step`` is that step."""


def tell_gone_back(trainer: Any) -> None:
    """Tell every callback that wants to know."""
    for callback in trainer.callbacks:
        if isinstance(callback, GoesBack):
            callback.on_gone_back(trainer, trainer.lightning_module)


def keeps_its_state(callback: object) -> bool:
    """Whether a callback stays as it is when training goes back, though its state was saved.

    Those that save checkpoints do, since what they saved is still there, and those that say so
    (``keeps_its_state = True``), since they remember what happened rather than where training stands.
    """
    return isinstance(callback, Checkpoint) or bool(getattr(callback, "keeps_its_state", False))
