"""What one server holds: rows of parameters and the user's own kind of optimizer over them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.strategies.parameter_server.messages.packing import State
from trainwright.strategies.parameter_server.refusals import needs_closure
from trainwright.strategies.parameter_server.server.hyper import GroupHyperParameters, plain_options
from trainwright.strategies.parameter_server.server.sharder import (
    Shape,
    ShardPart,
    Slice,
    digest_of,
    parts_of,
    share_out,
)

# Whose update of an element depends on that element alone, so that rows may be stepped apart.
ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop"}
)


@dataclass(frozen=True)
class OptimizerRecipe:
    """How to build an optimizer anew over other tensors.

    A copy of the user's own would not do: schedulers put a ``step`` on the instance that steps the worker's parameters.

    Args:
        cls: its class.
        options: of each group, without parameters.
        defaults: what its constructor took.
    """

    cls: type[Optimizer]
    options: tuple[dict[str, Any], ...]
    defaults: dict[str, Any]

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerRecipe:
        """That of the user's optimizer as it is now."""
        groups = tuple(plain_options(group) for group in optimizer.param_groups)
        return cls(type(optimizer), groups, plain_options(optimizer.defaults))

    @property
    def splits(self) -> bool:
        """Whether it may step rows of a tensor apart."""
        return self.cls.__name__ in ELEMENTWISE and self.cls.__module__.startswith("torch.optim.")

    def build(self, parameters: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
        """The optimizer over the parameters of each group.

        Raises:
            ValueError: if its constructor cannot be called so.
        """
        known = inspect.signature(self.cls.__init__).parameters
        arguments = {name: value for name, value in self.defaults.items() if name in known}
        groups = [{**dict(own), "params": list(held)} for own, held in zip(self.options, parameters, strict=True)]
        try:
            return self.cls(groups, **arguments)
        except TypeError as error:
            raise ValueError(
                f"A parameter server cannot build a {self.cls.__name__} of its own: {error}. Its constructor has to "
                "take the parameters (or groups of them) and, by name, the options that it keeps in `defaults`."
            ) from error


@dataclass(frozen=True)
class ShardPlan:
    """Everything that servers and workers agree on before they talk.

    Args:
        names: of the served parameters, in the order of the optimizer's groups.
        shapes: of these.
        dtypes: of these.
        groups: number of the group that each belongs to.
        recipe: of the optimizer.
        held: slices of each server.
        parts: of each server what is sent apart, see ``parts``; none:
            all it holds is one message.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    groups: tuple[int, ...]
    recipe: OptimizerRecipe
    held: tuple[tuple[Slice, ...], ...]
    hyper: GroupHyperParameters = field(compare=False, repr=False)
    parts: tuple[tuple[ShardPart, ...], ...] = ()

    @classmethod
    def of(
        cls, optimizer: Optimizer, names: Mapping[int, str], servers: int, only: Collection[int] | None = None
    ) -> ShardPlan:
        """The plan for the parameters of an optimizer; ``names`` by ``id``.

        Args:
            optimizer: whose.
            names: of parameters.
            servers: how many.
            only: ids of the parameters to serve; ``None``: all of the optimizer's.

        Raises:
            ValueError: if there are more servers than they could hold anything.
        """
        pairs = [(number, p) for number, group in enumerate(optimizer.param_groups) for p in group["params"]]
        pairs = [(number, p) for number, p in pairs if only is None or id(p) in only]
        shapes = tuple(tuple(p.shape) for _, p in pairs)
        recipe = OptimizerRecipe.of(optimizer)
        held = share_out(shapes, servers, whole=not recipe.splits)
        return cls(
            names=tuple(names.get(id(p), f"unnamed/{index}") for index, (_, p) in enumerate(pairs)),
            shapes=shapes,
            dtypes=tuple(p.dtype for _, p in pairs),
            groups=tuple(number for number, _ in pairs),
            recipe=recipe,
            held=tuple(map(tuple, held)),
            hyper=GroupHyperParameters(optimizer.param_groups),
        )

    def in_parts(self, tables: Collection[int] = ()) -> ShardPlan:
        """The same with parts, where a server holds enough for two; see :func:`parts_of`."""
        return replace(self, parts=tuple(parts_of(held, tables) for held in self.held))

    def parts_of(self, server: int) -> tuple[ShardPart, ...]:
        """Parts of a server; none: all it holds is one message."""
        return self.parts[server] if self.parts else ()

    def pulled_parts(self, server: int) -> tuple[ShardPart, ...]:
        """What is pulled apart from a server; at least one part, of all it holds."""
        return self.parts_of(server) or (ShardPart(0, len(self.held[server]), 0, self.numel(server)),)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is sent: float32, or float64 where a parameter is."""
        return torch.float64 if torch.float64 in self.dtypes else torch.float32

    @property
    def served(self) -> int:
        """The same where servers hold the same rows, however they are optimized, see :func:`digest_of`."""
        return digest_of(self.names, self.shapes, repr(self.held))

    @property
    def digest(self) -> int:
        """The same where the same is served, see :func:`digest_of`."""
        rest = f"{self.recipe.cls.__qualname__} {self.groups} {self.dtypes} {len(self.held)} {self.hyper.size}"
        return digest_of(self.names, self.shapes, rest)

    def numel(self, server: int) -> int:
        """Numbers that a server holds."""
        return sum(piece.numel for piece in self.held[server])


class Shard:
    """The part of a plan that one server holds, on the CPU.

    Args:
        plan: what is served.
        server: whose part.
    """

    def __init__(self, plan: ShardPlan, server: int) -> None:
        self._plan = plan
        self.slices = plan.held[server]
        self.flat = torch.zeros(plan.numel(server), dtype=plan.dtype)
        """All parameters of the server, one after the other, as they are sent."""
        self._views = self.split(self.flat)
        self._parameters = [
            # Of the type that is sent, a parameter is the memory that is sent.
            nn.Parameter(view if plan.dtypes[piece.parameter] == plan.dtype else view.to(plan.dtypes[piece.parameter]))
            for piece, view in zip(self.slices, self._views, strict=True)
        ]
        by_group: list[list[nn.Parameter]] = [[] for _ in plan.recipe.options]
        for piece, parameter in zip(self.slices, self._parameters, strict=True):
            by_group[plan.groups[piece.parameter]].append(parameter)
        self._optimizer = plan.recipe.build(by_group)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of a vector like :attr:`flat`, one per slice."""
        parts = flat.split([piece.numel for piece in self.slices])
        return [part.view(piece.shape) for part, piece in zip(parts, self.slices, strict=True)]

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of parameters and of the optimizer's state."""
        tensors = [v for state in self._optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        own = sum(p.nbytes for p, view in zip(self._parameters, self._views, strict=True) if p.dtype != view.dtype)
        return self.flat.nbytes + own, sum(tensor.nbytes for tensor in tensors)

    @torch.no_grad()
    def fill(self, flat: Tensor) -> None:
        """Take other values of the parameters."""
        self.flat.copy_(flat)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.dtype != view.dtype:
                parameter.copy_(view)

    @torch.no_grad()
    def step(self, gradient: Tensor, present: Sequence[bool], hyper: Tensor, lr_factor: float = 1.0) -> None:
        """One step of the optimizer.

        Args:
            gradient: like :attr:`flat`.
            present: for each slice whether it has a gradient; without one it is passed over, as ``grad=None`` is.
            hyper: options of the groups, see :class:`GroupHyperParameters`.
            lr_factor: what learning rates are multiplied by, for this step.
        """
        groups = self._optimizer.param_groups
        self._plan.hyper.write(groups, hyper)
        if lr_factor != 1.0:
            for group in groups:
                group["lr"] = group["lr"] * lr_factor
        for parameter, part, has in zip(self._parameters, self.split(gradient), present, strict=True):
            parameter.grad = part.to(parameter.dtype) if has else None
        with torch.enable_grad():  # as where a user calls it
            self._optimizer.step()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = None
            if parameter.dtype != view.dtype:
                view.copy_(parameter)

    def state(self) -> list[State]:
        """The optimizer's state of each slice; empty where it has none."""
        return [dict(self._optimizer.state.get(parameter, {})) for parameter in self._parameters]

    def load(self, states: Sequence[State]) -> None:
        """Take the optimizer's state of each slice in place of its own."""
        self._optimizer.state.clear()
        for parameter, state in zip(self._parameters, states, strict=True):
            if state:
                self._optimizer.state[parameter] = dict(state)


def split_state(plan: ShardPlan, states: Sequence[State]) -> list[list[State]]:
    """The states of whole parameters as those of slices, for each server."""
    return [[_rows(plan, piece, states[piece.parameter]) for piece in held] for held in plan.held]


def _rows(plan: ShardPlan, piece: Slice, state: State) -> State:
    whole = plan.shapes[piece.parameter]
    return {
        key: value[piece.start : piece.stop].clone() if _is_alike(value, whole) and whole else value
        for key, value in state.items()
    }


def join_state(plan: ShardPlan, states: Sequence[Sequence[State]]) -> list[State]:
    """The states of slices, for each server, as those of whole parameters."""
    parts: list[list[tuple[Slice, State]]] = [[] for _ in plan.names]
    for held, of_server in zip(plan.held, states, strict=True):
        for piece, state in zip(held, of_server, strict=True):
            parts[piece.parameter].append((piece, state))
    return [_joined(sorted(each, key=lambda pair: pair[0].start)) for each in parts]


def join_norms(plan: ShardPlan, norms: Sequence[Tensor]) -> Tensor:
    """The norms of slices, for each server, as those of whole parameters, without negative ones (not there)."""
    parts: list[list[float]] = [[] for _ in plan.names]
    for held, of_server in zip(plan.held, norms, strict=True):
        for piece, norm in zip(held, of_server.tolist(), strict=True):
            parts[piece.parameter].append(norm)
    there = [each for each in parts if not each[0] < 0]
    return torch.tensor([each[0] if len(each) == 1 else math.hypot(*each) for each in there], dtype=plan.dtype)


def _joined(parts: list[tuple[Slice, State]]) -> State:
    first, state = parts[0]
    if len(parts) == 1:
        return dict(state)
    return {
        key: torch.cat([other[key] for _, other in parts]) if _is_alike(value, first.shape) else value
        for key, value in state.items()
    }


def refuse_unserved(optimizer: Optimizer) -> None:
    """Refuse an optimizer that computes the loss within its step, or that takes sparse gradients alone.

    Raises:
        ValueError: with what to use instead.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise ValueError(needs_closure(type(optimizer).__name__))
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam takes sparse gradients alone, but a server puts the dense gradient together from the rows that "
            "workers push. Use Adagrad, which leaves rows without a gradient as they are, or strategy=ddp."
        )


def _is_alike(value: Any, shape: Shape) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == shape
