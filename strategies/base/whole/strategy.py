"""Whole parameters and gradients for user code, as a part of sharded strategies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning

from trainwright.strategies.base.whole.gradients import Gradients, Shown
from trainwright.strategies.base.whole.hooks import guard_hooks
from trainwright.strategies.base.whole.parts import ModuleParts
from trainwright.strategies.base.whole.view import WholeView

# Methods that read no parameters, or that must not be wrapped in a view.
_PLAIN = {
    *("connect", "setup", "setup_environment", "teardown", "barrier", "broadcast", "reduce", "all_gather"),
    *("reduce_boolean_decision", "process_dataloader", "batch_to_device"),
}


class Wholes:
    """Whole parameters and gradients for user code outside of forward.

    User hooks of the module and callbacks, and code after a run, see whole parameters and gradients under the names of
    the unmodified module. Values are gathered on use, which all ranks must do together; changes are written back to the
    shards.

    Args:
        strategy: see :class:`~trainwright.strategies.base.whole.gradients.Shown`.
    """

    def __init__(self, strategy: Shown) -> None:
        self._strategy = strategy
        self._view: WholeView | None = None
        self._guards = ExitStack()

    def show_in_hooks(self, trainer: Trainer) -> None:
        """Wrap user hooks in views, at the end of setup.

        Raises:
            ValueError: for a callback that replaces parameters.
        """
        if any(isinstance(callback, ModelPruning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError(
                "ModelPruning gives modules other parameters, which strategies with shards do not support. Type "
                "strategy=ddp, or prune after training."
            )
        self._stop()
        parts = self._strategy._module_parts()
        if parts is None:
            return
        self._view = view = self._view_of(parts)
        self._guards = guard_hooks(view, trainer, lambda: self._strategy.optimizers, parts.part)

    def _stop(self) -> None:
        self._guards.close()
        self._view = None

    def show_after_run(self) -> None:
        """Show whole parameters to code after the run, at the end of teardown, if the module stays split."""
        module = self._strategy.lightning_module
        before = self._view
        self._stop()
        parts = self._strategy._module_parts() if module is not None and before is not None else None
        if parts is None or all(parts.is_whole(name) for name in parts.shares):
            return
        view = self._view_of(parts, like=before)
        # A checkpoint may still be saved, which calls hooks.
        ends = guard_hooks(view, module.trainer, lambda: self._strategy.optimizers, parts.part)
        if parts.device.type != "cpu":
            refuse = partial(_refuse_call, parts.device)
            ends.callback(module.register_forward_pre_hook(refuse, prepend=True).remove)
        view.show_until_next_run(ends.close)

    def _view_of(self, parts: ModuleParts, like: WholeView | None = None) -> WholeView:
        strategy, module = self._strategy, self._strategy.lightning_module
        surroundings: dict[Any, Mapping[str, Callable[..., Any]]] = {
            each: {name: getattr(each, name) for name in _methods(type(each)) if name not in _PLAIN}
            for each in (strategy, strategy.measures)
        }
        surroundings[strategy.precision_plugin] = {"clip_gradients": strategy.precision_plugin.clip_gradients}
        return WholeView(module, parts, Gradients(strategy), surroundings, strategy._ranks_agree, like)


def _refuse_call(device: torch.device, module: LightningModule, *_: Any) -> None:
    """Raise the error of a call of a split module between runs.

    Raises:
        RuntimeError: always.
    """
    name = type(module).__name__
    raise RuntimeError(
        f"{name} is split over ranks, which exchange values on {device.type}, and in host memory between runs, so it "
        f"cannot be called. Use trainer.predict, or load a checkpoint into another module: {name}.load_from_checkpoint."
    )


def _methods(cls: type) -> list[str]:
    return [
        name for name in dir(cls) if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(cls, name))
    ]
