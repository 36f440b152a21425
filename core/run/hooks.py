"""Hook calls without overhead where no callback or module overrides the hook.

Lightning looks up, times and names every hook of every callback at every step; here overrides are looked up once per
epoch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.core.hooks import DataHooks

from trainwright.core.lightning_internals import _verify_loop_configurations

Hook = Callable[..., Any]


# Hooks of a step, and those that the module alone may have.
_BATCH_END = "on_train_batch_end"
_CALLED = (
    *("on_train_batch_start", _BATCH_END, "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step"),
)
_OF_MODULE = ("optimizer_step", "configure_gradient_clipping")


class HookTable:
    """Overrides of each hook of a trainer, callbacks first and the module last, as Lightning calls them.

    After a batch, callbacks that save follow the module, as Lightning has it after an epoch: else a checkpoint of that
    step would lack what the module's hook does to weights.

    Args:
        trainer: its callbacks and module are read once, now.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]
        self._listeners: dict[str, tuple[list[Hook], Hook | None]] = {}
        self._overridden: dict[str, bool] = {}
        self._last: dict[str, list[Hook]] = {}
        called = (hook for hook in _CALLED if self.listeners(hook) != ([], None))
        self.heard = frozenset([*called, *filter(self.module_overrides, _OF_MODULE)])
        """Hooks of a step that have listeners; the others need not be called."""

    def listeners(self, hook: str) -> tuple[list[Hook], Hook | None]:
        """Return the callbacks' methods and the module's method for ``hook``; ``None`` if the module does not override
        it."""
        if hook not in self._listeners:
            overriding = [c for c in self._callbacks if _overrides(c, hook, Callback)]
            module = getattr(self._module, hook) if self.module_overrides(hook) else None
            self._listeners[hook] = ([getattr(c, hook) for c in overriding], module)
            saving = [c for c in overriding if hook == _BATCH_END and isinstance(c, Checkpoint)]
            self._last[hook] = [getattr(c, hook) for c in saving]
        return self._listeners[hook]

    def module_overrides(self, hook: str) -> bool:
        """Return whether the user's module overrides ``hook``."""
        if hook not in self._overridden:
            self._overridden[hook] = _overrides(self._module, hook, LightningModule)
        return self._overridden[hook]

    def data_overrides(self, hook: str) -> bool:
        """Return whether the user's module or data module overrides a data ``hook``."""
        data = self._trainer.datamodule  # type: ignore[attr-defined]
        return self.module_overrides(hook) or (data is not None and _overrides(data, hook, DataHooks))

    def call(self, hook: str, *args: Any) -> Any:
        """Call all listeners of ``hook`` and return the module's result."""
        known = self._listeners.get(hook)
        callbacks, own = self.listeners(hook) if known is None else known
        if not callbacks and own is None:
            return None
        names = self._module.__dict__  # avoids nn.Module.__setattr__, which is slow
        before = names["_current_fx_name"]
        names["_current_fx_name"] = hook
        output, last = None, self._last[hook] if own is not None else ()
        for listener in callbacks:
            if listener not in last:
                listener(self._trainer, self._module, *args)
        if own is not None:
            output = own(*args)
        for listener in last:
            listener(self._trainer, self._module, *args)
        names["_current_fx_name"] = before
        return output


def refuse_missing_hooks(trainer: Trainer | None) -> None:
    """Raise Lightning's error for a module without the hooks of a run; for launchers, before they start ranks.

    Raises:
        MisconfigurationException: naming the hook.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of loaders, which are not attached yet
        if trainer is not None:
            _verify_loop_configurations(trainer)


def _overrides(instance: object, hook: str, base: type) -> bool:
    if hook in vars(instance):
        return True  # set on the instance, for example by a mock
    return getattr(type(instance), hook, None) is not getattr(base, hook, None)
