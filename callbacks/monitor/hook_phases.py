"""Phases of a step from hooks, for Lightning's own Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback

from trainwright.core.run.phases import BACKWARD, DATA, FORWARD, HOOKS, IDLE, OPTIMIZER, SAVING, VALIDATION, Phases


class HookPhases(Callback):
    """Reports phases of a Trainer that has none; the time between hooks counts as data.

    Args:
        phases: receives them.
    """

    looks_at_parameters = False

    def __init__(self, phases: Phases) -> None:
        self.phases = phases

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Begin to wait for the next batch, if there is one."""
        self.phases.begin(IDLE if trainer.is_last_batch else DATA)


def _begin(phase: str) -> Callable[..., None]:
    return lambda self, *_: self.phases.begin(phase)


# The hook that begins each phase.
for _hook, _phase in {
    "on_train_epoch_start": DATA,
    "on_train_batch_start": FORWARD,
    "on_before_backward": BACKWARD,
    "on_after_backward": OPTIMIZER,
    "on_before_optimizer_step": OPTIMIZER,
    "on_validation_start": VALIDATION,
    "on_validation_end": HOOKS,
    "on_save_checkpoint": SAVING,
    "on_train_epoch_end": IDLE,
}.items():
    setattr(HookPhases, _hook, _begin(_phase))


def phases_of(trainer: Any) -> Phases:
    """Return the phases of a Trainer: its own, or from hooks. Call in ``setup``, as it may append a callback."""
    own = getattr(trainer, "phases", None)
    if isinstance(own, Phases):
        return own
    for callback in trainer.callbacks:
        if isinstance(callback, HookPhases):
            return callback.phases
    phases = Phases()
    trainer.callbacks.append(HookPhases(phases))
    return phases
