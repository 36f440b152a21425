"""Who may look at parameters between the end of a step and the forward of the next one."""

from __future__ import annotations

from typing import Any

import torch

from trainwright.core.run.hooks import HookTable

_HOOKS = ("on_train_batch_end", "on_train_batch_start")
_OF_MODULES = ("optimizer_step", "lr_scheduler_step")
_OF_DATA = ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer")
# Of Lightning's callbacks, where those live that look by way of the strategy, or at something else.
_BLIND = tuple(f"lightning.pytorch.callbacks.{name}" for name in ("lr_monitor", "model_checkpoint", "progress"))


def has_onlookers(trainer: Any) -> bool:
    """Whether anybody might, so that a step has to wait for all parameters.

    A callback does not whose class says ``looks_at_parameters = False`` where it overrides the hook, nor do some of
    Lightning's. TorchScript reads past all that can be watched in a forward pass.
    """
    table = HookTable(trainer)
    if any(table.module_overrides(hook) for hook in _OF_MODULES) or any(map(table.data_overrides, _OF_DATA)):
        return True
    for hook in _HOOKS:
        callbacks, own = table.listeners(hook)
        if own is not None or any(_may_look(listener, hook) for listener in callbacks):
            return True
    return any(isinstance(part, torch.jit.ScriptModule) for part in trainer.lightning_module.modules())


def _may_look(listener: Any, hook: str) -> bool:
    classes = type(getattr(listener, "__self__", None)).__mro__
    owner = next((each for each in classes if hook in vars(each)), object)
    return bool(vars(owner).get("looks_at_parameters", not owner.__module__.startswith(_BLIND)))
