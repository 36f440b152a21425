"""Wrapping of user hooks in a view of whole parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.core.hooks import ModelHooks
from torch import Tensor
from torch.optim import Optimizer

from trainwright.strategies.base.whole.tensors import WholeTensor
from trainwright.strategies.base.whole.view import WholeView
from trainwright.strategies.contract.attributes import with_attributes

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

    @functools.wraps(method)
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
