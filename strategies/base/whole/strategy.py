"""Whole parameters and gradients for user code, as a part of sharded strategies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.strategies.base.measures import Measures
from trainwright.strategies.base.whole.hooks import guard_hooks
from trainwright.strategies.base.whole.parts import ModuleParts
from trainwright.strategies.base.whole.view import WholeView
from trainwright.strategies.contract.part import Host
from trainwright.strategies.state.shards import ParameterShard

# Methods that read no parameters, or that must not be wrapped in a view.
_PLAIN = {
    *("connect", "setup", "setup_environment", "teardown", "barrier", "broadcast", "reduce", "all_gather"),
    *("reduce_boolean_decision", "process_dataloader", "batch_to_device"),
}


class Shown(Host, Protocol):
    """A strategy as seen by :class:`Wholes`."""

    _ranks_agree: bool
    """True if all ranks run user code identically; not if replicas differ."""
    _accumulates_gradients: bool
    """True if more micro-batches follow before gradients are averaged."""

    measures: Measures

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]: ...

    def _module_parts(self) -> ModuleParts | None:
        """Return this rank's parts of the module; ``None``: one rank."""

    def _shard_of(self, parameter: nn.Parameter) -> ParameterShard | None:
        """Return the optimizer's shard of a parameter; ``None``: the parameter itself."""

    def _as_optimized(self, parameter: nn.Parameter) -> Tensor: ...

    def _group_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Return the parameter names of each group, merged over stages. A collective."""

    def _parameters_written(self) -> None:
        """Handle parameters that were modified outside of the optimizer."""


class Wholes:
    """Whole parameters and gradients for user code outside of forward.

    User hooks of the module and callbacks, and code after a run, see whole parameters and gradients under the names of
    the unmodified module. Values are gathered on use, which all ranks must do together; changes are written back to the
    shards.

    Args:
        strategy: see :class:`Shown`.
    """

    def __init__(self, strategy: Shown) -> None:
        self._strategy = strategy
        self._view: WholeView | None = None
        self._end_guards: Callable[[], None] = _nothing

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
        self._end_guards = guard_hooks(view, trainer, lambda: self._strategy.optimizers, parts.part)

    def _stop(self) -> None:
        end, self._end_guards, self._view = self._end_guards, _nothing, None
        end()

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
        ends = ExitStack()
        ends.callback(guard_hooks(view, module.trainer, lambda: self._strategy.optimizers, parts.part))
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
        return WholeView(module, parts, _Gradients(strategy), surroundings, strategy._ranks_agree, like)


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


class _Gradients:
    """Adapter of a strategy to :class:`~trainwright.strategies.base.whole.view.Gradients`."""

    def __init__(self, strategy: Shown) -> None:
        self._strategy = strategy
        module = strategy.lightning_module
        self._parameters = dict(module.named_parameters())
        self._read: Callable[[], Any] = type(strategy).named_gradients.__get__(strategy)

    def gradient_parts(self) -> Mapping[str, Tensor]:
        if self._strategy._accumulates_gradients:
            raise RuntimeError(
                "Gradients are read between two micro-batches of one optimizer step, where they are not averaged over "
                "ranks yet. Read them in on_before_optimizer_step, or use accumulate_grad_batches=1."
            )
        return dict(self._read())

    def set_gradient_part(self, name: str, part: Tensor | None) -> None:
        parameter = self._parameters[name]
        shard = self._strategy._shard_of(parameter)
        if shard is None:
            parameter.grad = part
            return
        if part is None:
            shard.optimized.grad = parameter.grad = None
            return
        rows = part[shard.rows[0] : shard.rows[1]] if shard.rows is not None else part
        shard.optimized.grad = shard.distributed(rows.to(shard.optimized_part.device, copy=True))
        shard.show_gradient()

    def parameters_written(self) -> None:
        self._strategy._parameters_written()

    def group_names(self, optimizer: Optimizer) -> list[list[str]]:
        return self._strategy._group_names(optimizer)

    def held_in_optimizer(self, name: str) -> Tensor | None:
        parameter = self._parameters.get(name)
        return None if parameter is None else self._strategy._as_optimized(parameter)


def _methods(cls: type) -> list[str]:
    return [
        name for name in dir(cls) if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(cls, name))
    ]


def _nothing() -> None:
    pass
