"""Whole parameters and gradients for user code, as a part of sharded strategies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.core.hooks import ModelHooks
from torch import Tensor
from torch.optim import Optimizer

from trainwright.strategies.base.whole.after_run import AfterRun
from trainwright.strategies.base.whole.gradients import Gradients, Shown
from trainwright.strategies.base.whole.parts import ModuleParts
from trainwright.strategies.base.whole.tensors import WholeTensor
from trainwright.strategies.base.whole.view import WholeView
from trainwright.strategies.contract.attributes import with_attributes

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
        refuse = partial(_refuse_call, parts.device) if parts.device.type != "cpu" else None
        after = AfterRun(module, view, parts, self._strategy.certificate.written, refuse)
        ends.callback(after.end)
        view.show_until_next_run(ends.close)
        after.attach()

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


# ---- user hooks in a view of whole parameters -----------------------------------------------------------------------

_OF_CALLBACKS = tuple(name for name in vars(Callback) if name.startswith("on_") and name != "on_load_checkpoint")
_OF_MODULES = (
    *(name for name in vars(ModelHooks) if name.startswith("on_") and "_model_" not in name),
    "on_save_checkpoint",
    "configure_gradient_clipping",
    "optimizer_step",
)
# Packages whose hooks support shards.
_SHARD_AWARE = ("lightning.", "pytorch_lightning.", "lightning_fabric.", "trainwright.", "unittest.")


def guard_hooks(
    view: WholeView, trainer: Trainer, optimizers: Callable[[], list[Optimizer]], parts: StatePart
) -> ExitStack:
    """Show whole parameters in user hooks, until the returned stack is closed.

    A module or callback with an attribute ``sees_parts = True`` still sees this rank's parts.

    Args:
        view: of the whole parameters.
        trainer: with the module and callbacks.
        optimizers: returns those of the strategy.
        parts: returns this rank's part of a whole value that a hook has put into a checkpoint's ``state_dict``.
    """
    guards = ExitStack()
    targets: list[tuple[Any, tuple[str, ...]]] = [(trainer.lightning_module, _OF_MODULES)]
    targets += [(callback, _OF_CALLBACKS) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    for target, names in targets:
        for name in names if not getattr(target, "sees_parts", False) else ():
            method = getattr(target, name, None)
            if method is not None and not _supports_shards(method):
                guarded = _guarded(view, f"{type(target).__name__}.{name}", method, optimizers, parts)
                guards.enter_context(with_attributes(target, **{name: guarded}))
    return guards


StatePart = Callable[[str, Tensor], Tensor]


def _supports_shards(method: Callable[..., Any]) -> bool:
    module = getattr(getattr(method, "__func__", method), "__module__", None) or ""
    return module.startswith(_SHARD_AWARE)


def _guarded(
    view: WholeView, where: str, method: Callable[..., Any], optimizers: Callable[[], list[Optimizer]], parts: StatePart
) -> Callable[..., Any]:
    saves = where.endswith(".on_save_checkpoint")

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with view.showing(where, optimizers()):
            if not saves:
                return method(*args, **kwargs)
            with _whole_state(view, args[-1], parts):
                return method(*args, **kwargs)

    return run


@contextmanager
def _whole_state(view: WholeView, checkpoint: dict[str, Any], parts: StatePart) -> Iterator[None]:
    """Put whole tensors into ``checkpoint["state_dict"]`` in a ``with`` block."""
    held: Mapping[str, Any] | None = checkpoint.get("state_dict")
    if held is None:
        yield
        return
    shown = view.state_stand_ins()
    state = checkpoint["state_dict"] = {key: shown.get(key, held.get(key)) for key in {**shown, **held}}
    try:
        yield
    finally:
        state = checkpoint.get("state_dict", state)
        kept = {key: _to_part(key, value, held, shown, parts) for key, value in state.items()}
        checkpoint["state_dict"] = {key: value for key, value in kept.items() if value is not None or key in held}


def _to_part(key: str, value: Any, held: Mapping[str, Any], shown: Mapping[str, WholeTensor], parts: StatePart) -> Any:
    if isinstance(value, WholeTensor):
        return held.get(key) if value.whole_name == key or key in held else value.whole()
    if key in shown and isinstance(value, Tensor):
        return parts(key, value) if key in held else None
    return value
