"""Gradients of a strategy, for its view of whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.strategies.base.measures import Measures
from trainwright.strategies.base.whole.parts import ModuleParts
from trainwright.strategies.contract.part import Host
from trainwright.strategies.state.shards import ParameterShard


class Shown(Host, Protocol):
    """A strategy as seen by :class:`Wholes`."""

    _ranks_agree: bool
    """True if all ranks run user code identically; not if replicas differ."""
    _accumulates_gradients: bool
    """True if more micro-batches follow before gradients are averaged."""

    measures: Measures
    certificate: Any

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


class Gradients:
    """Access to a strategy's gradients, by name, as the optimizer sees them.

    Args:
        strategy: see :class:`Shown`.
    """

    def __init__(self, strategy: Shown) -> None:
        self.strategy = strategy
        self._parameters = dict(strategy.lightning_module.named_parameters())
        self._read: Callable[[], Any] = type(strategy).named_gradients.__get__(strategy)

    def gradient_parts(self) -> Mapping[str, Tensor]:
        """Return this rank's averaged gradients.

        Raises:
            RuntimeError: if they are not averaged yet.
        """
        if self.strategy._accumulates_gradients:
            raise RuntimeError(
                "Gradients are read between two micro-batches of one optimizer step, where they are not averaged over "
                "ranks yet. Read them in on_before_optimizer_step, or use accumulate_grad_batches=1."
            )
        return dict(self._read())

    def set_gradient_part(self, name: str, part: Tensor | None) -> None:
        """Set this rank's part of a gradient, or drop the gradient."""
        parameter = self._parameters[name]
        shard = self.strategy._shard_of(parameter)
        if shard is None:
            parameter.grad = part
            return
        if part is None:
            shard.optimized.grad = parameter.grad = None
            return
        rows = part[shard.rows[0] : shard.rows[1]] if shard.rows is not None else part
        shard.optimized.grad = shard.distributed(rows.to(shard.optimized_part.device, copy=True))
        shard.show_gradient()

    def held_in_optimizer(self, name: str) -> Tensor | None:
        """Return the tensor for a parameter in this rank's optimizer."""
        parameter = self._parameters.get(name)
        return None if parameter is None else self.strategy._as_optimized(parameter)
