"""Detection of hooks that may read or write parameters or gradients of a worker."""

from __future__ import annotations

from typing import Any

import torch

from trainwright.core.run.hooks import HookTable

_HOOKS = ("on_train_batch_end", "on_train_batch_start")
_OF_MODULES = ("optimizer_step", "lr_scheduler_step")
_OF_DATA = ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer")
# Lightning callbacks that read parameters via the strategy or not at all.
_NON_READERS = tuple(f"lightning.pytorch.callbacks.{name}" for name in ("lr_monitor", "model_checkpoint", "progress"))
# Hooks between backward and the optimizer's step, and the one that may still see the gradients of the last step.
_GRADIENT_HOOKS = ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step")
_CLIPPING = "configure_gradient_clipping"
_OURS = "trainwright."


def may_read_parameters(trainer: Any) -> bool:
    """Return whether a hook may read parameters, so that a step must wait for all of them.

    Callbacks whose class sets ``looks_at_parameters = False`` where it overrides the hook do not, nor do some of
    Lightning's. TorchScript bypasses all that can be watched in a forward pass.
    """
    table = HookTable(trainer)
    if any(map(table.module_overrides, _OF_MODULES)) or any(map(table.data_overrides, _OF_DATA)):
        return True
    if any(_may_use(table, hook) for hook in _HOOKS):
        return True
    return any(isinstance(part, torch.jit.ScriptModule) for part in trainer.lightning_module.modules())


def may_use_gradients(trainer: Any) -> bool:
    """Return whether a hook of the user may read or change the gradients of a step."""
    return HookTable(trainer).module_overrides("optimizer_step") or bool(gradient_hooks(trainer))


def may_write_parameters(trainer: Any) -> bool:
    """Return whether a hook of the user runs in which parameters may be written."""
    table = HookTable(trainer)
    if any(map(table.module_overrides, _OF_MODULES)) or any(_may_use(table, hook, ours=False) for hook in _HOOKS):
        return True
    return bool(gradient_hooks(trainer))


def gradient_hooks(trainer: Any) -> list[str]:
    """Return the hooks of the user that are for the gradients of a step."""
    table = HookTable(trainer)
    found = [hook for hook in _GRADIENT_HOOKS if _may_use(table, hook, ours=False)]
    return [*found, _CLIPPING] if table.module_overrides(_CLIPPING) else found


def _may_use(table: HookTable, hook: str, ours: bool = True) -> bool:
    callbacks, own = table.listeners(hook)
    return own is not None or any(_looks(listener, hook, () if ours else (_OURS,)) for listener in callbacks)


def _looks(listener: Any, hook: str, others: tuple[str, ...]) -> bool:
    classes = type(getattr(listener, "__self__", None)).__mro__
    owner = next((each for each in classes if hook in vars(each)), object)
    return bool(vars(owner).get("looks_at_parameters", not owner.__module__.startswith((*_NON_READERS, *others))))
