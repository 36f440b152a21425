"""Phases of a step where the loop does not tell them: as the hooks of Lightning's own Trainer show them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from trainwright.core.run.phases import BACKWARD, DATA, FORWARD, HOOKS, IDLE, OPTIMIZER, VALIDATION, Phases


class HookPhases(Callback):
    """Tells the phases of a Trainer that is not of this project; what its loop does between hooks counts as data.

    Args:
        phases: what is told.
    """

    looks_at_parameters = False

    def __init__(self, phases: Phases) -> None:
        self.phases = phases

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first batch is read."""
        self.phases.begin(DATA)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Forward comes."""
        self.phases.begin(FORWARD)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Backward comes."""
        self.phases.begin(BACKWARD)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gradients are there."""
        self.phases.begin(OPTIMIZER)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """The optimizer comes."""
        self.phases.begin(OPTIMIZER)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hooks of others, and the next batch."""
        self.phases.begin(DATA)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """No part of a step."""
        self.phases.begin(VALIDATION)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Back in training."""
        self.phases.begin(HOOKS)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training has ended."""
        self.phases.begin(IDLE)


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
