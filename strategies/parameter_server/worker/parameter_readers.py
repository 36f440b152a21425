"""Detection of code that may read parameters between the end of a step and the next forward."""

from __future__ import annotations

from typing import Any

import torch

from trainwright.core.run.hooks import HookTable

_HOOKS = ("on_train_batch_end", "on_train_batch_start")
_OF_MODULES = ("optimizer_step", "lr_scheduler_step")
_OF_DATA = ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer")
# Lightning callbacks that read parameters via the strategy or not at all.
_NON_READERS = tuple(f"lightning.pytorch.callbacks.{name}" for name in ("lr_monitor", "model_checkpoint", "progress"))


def may_read_parameters(trainer: Any) -> bool:
    """Return whether a hook may read parameters, so that a step must wait for all of them.

    Callbacks whose class sets ``looks_at_parameters = False`` where it overrides the hook do not, nor do some of
    Lightning's. TorchScript bypasses all that can be watched in a forward pass.
    """
    table = HookTable(trainer)
    if any(table.module_overrides(hook) for hook in _OF_MODULES) or any(map(table.data_overrides, _OF_DATA)):
        return True
    for hook in _HOOKS:
        callbacks, own = table.listeners(hook)
        if own is not None or any(_may_read(listener, hook) for listener in callbacks):
            return True
    return any(isinstance(part, torch.jit.ScriptModule) for part in trainer.lightning_module.modules())


def _may_read(listener: Any, hook: str) -> bool:
    classes = type(getattr(listener, "__self__", None)).__mro__
    owner = next((each for each in classes if hook in vars(each)), object)
    return bool(vars(owner).get("looks_at_parameters", not owner.__module__.startswith(_NON_READERS)))
