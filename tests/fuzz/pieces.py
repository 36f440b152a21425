"""Optimizers, schedulers and callbacks of fuzzed programs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR


def momentum(module: Any) -> Optimizer:
    """SGD with momentum."""
    return SGD(module.parameters(), lr=0.05, momentum=0.9)


def nesterov(module: Any) -> Optimizer:
    """SGD with Nesterov momentum and weight decay, foreach."""
    return SGD(module.parameters(), lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01, foreach=True)


def adamw(module: Any) -> Optimizer:
    """AdamW, whose large epsilon keeps rounding small."""
    return AdamW(module.parameters(), lr=1e-2, eps=1e-3)


def grouped(module: Any) -> Optimizer:
    """Groups with and without weight decay, of different rates."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    decayed = [parameter for _, parameter in named if parameter.ndim > 1]
    others = [parameter for _, parameter in named if parameter.ndim <= 1]
    return AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}],
        lr=1e-2,
        eps=1e-3,
    )


def two(module: Any) -> list[Optimizer]:
    """Two optimizers, for manual optimization: one of matrices, one of all others."""
    found = list(module.parameters())
    return [
        SGD([each for each in found if each.ndim > 1], lr=0.05, momentum=0.9),
        SGD([each for each in found if each.ndim <= 1], lr=0.02),
    ]


def warmup(optimizer: Optimizer, steps: int) -> dict[str, Any]:
    """Linear warm-up and decay, by step."""
    return {"scheduler": LambdaLR(optimizer, lambda step: min(step + 1, 3) / 3 * 0.95**step), "interval": "step"}


def by_epoch(optimizer: Optimizer, steps: int) -> dict[str, Any]:
    """A smaller rate in each epoch."""
    return {"scheduler": StepLR(optimizer, 1, gamma=0.5), "interval": "epoch"}


def one_cycle(optimizer: Optimizer, steps: int) -> dict[str, Any]:
    """One cycle over all steps, with momentum."""
    return {"scheduler": OneCycleLR(optimizer, 0.08, total_steps=steps + 1), "interval": "step"}


def plateau_by_step(optimizer: Optimizer, steps: int) -> dict[str, Any]:
    """Less when the training loss of a step has not fallen."""
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return {"scheduler": scheduler, "interval": "step", "monitor": "loss_step"}


def plateau_by_epoch(optimizer: Optimizer, steps: int) -> dict[str, Any]:
    """Less when the training loss of an epoch has not fallen by a third."""
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
    return {"scheduler": scheduler, "interval": "epoch", "monitor": "loss_epoch"}


def plateau_on_validation(optimizer: Optimizer, steps: int) -> dict[str, Any]:
    """Less when the validation loss has not fallen by a third."""
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
    return {"scheduler": scheduler, "interval": "epoch", "monitor": "val_loss"}


class Norms(pl.Callback):
    """Logs norms of weights and gradients that it reads in hooks."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        found = [each.grad for each in pl_module.parameters() if each.grad is not None]
        norm = torch.stack([each.double().norm() for each in found]).norm()
        pl_module.log("gradient_norm", norm, on_step=True, on_epoch=False)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        norm = torch.stack([each.detach().double().norm() for each in pl_module.parameters()]).norm()
        pl_module.log("weight_norm", norm, on_step=True, on_epoch=False)


class Average(pl.Callback):
    """Keeps the moving average of the weights in a state of its own."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            kept = self.kept.setdefault(name, parameter.detach().clone())
            kept.lerp_(parameter.detach(), 0.3)
        norm = torch.stack([each.double().norm() for each in self.kept.values()]).norm()
        pl_module.log("average_norm", norm, on_step=True, on_epoch=False)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict["kept"]


class Interrupted(Exception):
    """The run ends here and is resumed by another one."""


class Stopper(Checkpoint):
    """Saves after so many optimizer steps and ends the run."""

    def __init__(self, after: int, path: str) -> None:
        self.left, self.path, self.steps = after, path, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.left -= trainer.global_step > self.steps
        self.steps = trainer.global_step
        if self.left == 0:
            trainer.save_checkpoint(self.path)
            raise Interrupted
