"""Phases of a step where the loop does not report them: as the hooks of Lightning's own Trainer show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback

from trainwright.core.run.phases import BACKWARD, DATA, FORWARD, HOOKS, IDLE, OPTIMIZER, VALIDATION, Phases


class HookPhases(Callback):
    """Reports the phases of a Trainer that is not of this project; what its loop does between hooks counts as data.

    Args:
        phases: what is reported.
    """

    looks_at_parameters = False

    def __init__(self, phases: Phases) -> None:
        self.phases = phases


def _begin(phase: str) -> Callable[..., None]:
    return lambda self, *_: self.phases.begin(phase)


# The hook with which each phase begins.
for _hook, _phase in {
    "on_train_epoch_start": DATA,
    "on_train_batch_start": FORWARD,
    "on_before_backward": BACKWARD,
    "on_after_backward": OPTIMIZER,
    "on_before_optimizer_step": OPTIMIZER,
    "on_train_batch_end": DATA,
    "on_validation_start": VALIDATION,
    "on_validation_end": HOOKS,
    "on_train_end": IDLE,
}.items():
    setattr(HookPhases, _hook, _begin(_phase))


def phases_of(trainer: Any) -> Phases:
    """The phases of a Trainer: its own, or as hooks show them.

    Call it in ``setup``: where hooks are needed, a callback is added behind the others.
    """
    own = getattr(trainer, "phases", None)
    if isinstance(own, Phases):
        return own
    for callback in trainer.callbacks:
        if isinstance(callback, HookPhases):
            return callback.phases
    phases = Phases()
    trainer.callbacks.append(HookPhases(phases))
    return phases
