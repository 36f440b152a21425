"""The part of a strategy whose ranks hold parts that shows user code whole parameters and gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.strategies.base.measures import Measures
from trainwright.strategies.base.whole.hooks import guard_hooks
from trainwright.strategies.base.whole.parts import ModuleParts
from trainwright.strategies.base.whole.view import WholeView
from trainwright.strategies.contract.part import Host
from trainwright.strategies.state.shards import ParameterShard

# Methods that read no parameters, or that a view must not surround.
_PLAIN = {
    "connect",
    "setup",
    "setup_environment",
    "teardown",
    "barrier",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_boolean_decision",
    "process_dataloader",
    "batch_to_device",
}


class Shown(Host, Protocol):
    """What is shown whole, and how it is held: what :class:`Wholes` reads of a strategy."""

    _ranks_agree: bool
    """Whether all ranks run user code alike; not where replicas differ."""
    _accumulates_gradients: bool
    """Whether micro-batches follow before gradients are averaged."""

    measures: Measures

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]: ...

    def _module_parts(self) -> ModuleParts | None:
        """Return what this rank holds of the module; ``None``: there is one rank."""

    def _shard_of(self, parameter: nn.Parameter) -> ParameterShard | None:
        """Return what the optimizer holds in place of a parameter, if it is not the parameter."""

    def _as_optimized(self, parameter: nn.Parameter) -> Tensor: ...

    def _group_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Return the names of the parameters of each group, on all stages; a collective."""

    def _parameters_written(self) -> None:
        """Take note that parameters have been changed beside the optimizer."""


class Wholes:
    """Shows user code outside of forward wholes of what the ranks of a strategy hold parts of.

    Hooks of the module and of callbacks that users have written see whole parameters and gradients, by the names of the
    unmodified module, as does code after a run. Values are gathered when they are used, which all ranks must do
    together, and what was written is put back into the parts.

    Args:
        strategy: see :class:`Shown`.
    """

    def __init__(self, strategy: Shown) -> None:
        self._strategy = strategy
        self._view: WholeView | None = None
        self._end_guards: Callable[[], None] = _nothing

    def show_in_hooks(self, trainer: Trainer) -> None:
        """At the end of setup: put views around the hooks of users.

        Raises:
            ValueError: for a callback that cannot work with a stand-in of a whole.
        """
        self._stop()
        parts = self._strategy._module_parts()
        if parts is None:
            return
        pruning = any(isinstance(callback, ModelPruning) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if pruning and not all(parts.is_whole(name) for name in parts.shares):
            raise ValueError(
                "ModelPruning chooses weights of whole parameters and exchanges these, of which ranks hold parts under "
                "this layout. Use strategy=zero2 or ddp, or prune after training."
            )
        self._view = view = self._view_of(parts)
        self._end_guards = guard_hooks(view, trainer, lambda: self._strategy.optimizers, parts.part)

    def _stop(self) -> None:
        end, self._end_guards, self._view = self._end_guards, _nothing, None
        end()

    def show_after_run(self) -> None:
        """At the end of teardown: where the module stays split, code that follows sees wholes."""
        module = self._strategy.lightning_module
        before = self._view
        self._stop()
        parts = self._strategy._module_parts() if module is not None and before is not None else None
        if parts is None or all(parts.is_whole(name) for name in parts.shares):
            return
        view = self._view_of(parts, like=before)
        # A checkpoint may be saved yet, with hooks of its own.
        view.stay(guard_hooks(view, module.trainer, lambda: self._strategy.optimizers, parts.part))

    def _view_of(self, parts: ModuleParts, like: WholeView | None = None) -> WholeView:
        strategy, module = self._strategy, self._strategy.lightning_module
        surroundings: dict[Any, Mapping[str, Callable[..., Any]]] = {
            each: {name: getattr(each, name) for name in _methods(type(each)) if name not in _PLAIN}
            for each in (strategy, strategy.measures)
        }
        surroundings[strategy.precision_plugin] = {"clip_gradients": strategy.precision_plugin.clip_gradients}
        return WholeView(module, parts, _Gradients(strategy), surroundings, strategy._ranks_agree, like)


class _Gradients:
    """A strategy's gradients, as :class:`~trainwright.strategies.base.whole.view.Gradients` wants them."""

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
