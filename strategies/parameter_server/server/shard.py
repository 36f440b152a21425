"""Shard of one server: rows of parameters, with the user's kind of optimizer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.strategies.parameter_server.messages.packing import State
from trainwright.strategies.parameter_server.problems import needs_closure
from trainwright.strategies.parameter_server.server.sharder import (
    Shape,
    ShardPart,
    Slice,
    digest_of,
    parts_of,
    places,
    share_out,
)

T = TypeVar("T")

# Optimizers with element-wise updates, so that rows may be stepped separately.
ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop"}
)


def is_served(parameter: Tensor) -> bool:
    """Return whether servers may hold a parameter: not integers, which have no gradients."""
    return parameter.is_floating_point() or parameter.is_complex()


@dataclass(frozen=True)
class OptimizerRecipe:
    """Class and options of an optimizer, to build it over other tensors.

    Not a copy of the user's: schedulers replace its ``step`` by one that steps the worker's parameters.

    Args:
        cls: its class.
        options: of each group, without parameters.
        defaults: arguments of its constructor.
    """

    cls: type[Optimizer]
    options: tuple[dict[str, Any], ...]
    defaults: dict[str, Any]

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerRecipe:
        """Return the recipe of the user's current optimizer."""
        groups = tuple(plain_options(group) for group in optimizer.param_groups)
        return cls(type(optimizer), groups, plain_options(optimizer.defaults))

    @property
    def splits(self) -> bool:
        """True if it may step rows of a tensor separately."""
        return self.cls.__name__ in ELEMENTWISE and self.cls.__module__.startswith("torch.optim.")

    def build(self, parameters: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
        """Build the optimizer over the parameters of each group.

        Raises:
            ValueError: if its constructor does not support it.
        """
        known = inspect.signature(self.cls.__init__).parameters
        arguments = {name: value for name, value in self.defaults.items() if name in known}
        groups = [{**dict(own), "params": list(held)} for own, held in zip(self.options, parameters, strict=True)]
        try:
            return self.cls(groups, **arguments)
        except TypeError as error:
            raise ValueError(
                f"A parameter server cannot build a {self.cls.__name__} of its own: {error}. Its constructor must take "
                "the parameters (or groups of them) and, by name, the options that it keeps in `defaults`."
            ) from error


@dataclass(frozen=True)
class ShardPlan:
    """Agreement of servers and workers on what is served.

    Args:
        names: of the served parameters, in the order of the optimizer's groups.
        shapes: of these.
        dtypes: of these.
        groups: group index of each.
        recipe: of the optimizer.
        held: slices of each server.
        hyper: reads and writes options of the optimizer's groups.
        parts: of each server, messages sent separately; empty: one message for all.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    groups: tuple[int, ...]
    recipe: OptimizerRecipe
    held: tuple[tuple[Slice, ...], ...]
    hyper: GroupHyperParameters = field(compare=False, repr=False)
    parts: tuple[tuple[ShardPart, ...], ...]

    @classmethod
    def of(
        cls, optimizer: Optimizer, names: Mapping[int, str], servers: int, only: Collection[int] | None = None
    ) -> ShardPlan:
        """Create the plan of an optimizer's parameters.

        Args:
            optimizer: of the user.
            names: of parameters, by ``id``.
            servers: how many.
            only: ids of the parameters to serve; ``None``: all of the optimizer's but integers.

        Raises:
            ValueError: if there are more servers than slices.
        """
        groups = enumerate(optimizer.param_groups)
        pairs = [(number, p) for number, group in groups for p in group["params"] if is_served(p)]
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
            parts=((),) * servers,
        )

    def in_parts(self, tables: Collection[int] = ()) -> ShardPlan:
        """Return the plan with parts, where a server holds enough for two; see :func:`parts_of`."""
        return replace(self, parts=tuple(parts_of(held, tables) for held in self.held))

    def pulled_parts(self, server: int) -> tuple[ShardPart, ...]:
        """Return the parts pulled separately from a server; at least one part."""
        return self.parts[server] or (ShardPart(0, len(self.held[server]), 0, self.numel(server)),)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of messages: float32, or float64 if a parameter has it."""
        return torch.float64 if torch.float64 in self.dtypes else torch.float32

    @property
    def served(self) -> int:
        """Digest of what servers hold, independent of the optimizer, see :func:`digest_of`."""
        return digest_of(self.names, self.shapes, repr(self.held))

    @property
    def digest(self) -> int:
        """Digest of what is served and how it is optimized, see :func:`digest_of`."""
        rest = f"{self.recipe.cls.__qualname__} {self.groups} {self.dtypes} {len(self.held)} {self.hyper.size}"
        return digest_of(self.names, self.shapes, rest)

    def numel(self, server: int) -> int:
        """Return the number of elements on a server."""
        return sum(piece.numel for piece in self.held[server])


class Shard:
    """One server's part of a plan, on the CPU.

    Args:
        plan: of all servers.
        server: its index.
    """

    def __init__(self, plan: ShardPlan, server: int) -> None:
        self._plan = plan
        self.slices = plan.held[server]
        self.flat = torch.zeros(plan.numel(server), dtype=plan.dtype)
        """All parameters of the server, concatenated, as sent."""
        views = self.split(self.flat)
        # A parameter of the message dtype shares its memory; others are copies.
        self._parameters = [
            nn.Parameter(view.to(plan.dtypes[piece.parameter])) for piece, view in zip(self.slices, views, strict=True)
        ]
        self._copies = [(p, view) for p, view in zip(self._parameters, views, strict=True) if p.dtype != view.dtype]
        by_group: list[list[nn.Parameter]] = [[] for _ in plan.recipe.options]
        for piece, parameter in zip(self.slices, self._parameters, strict=True):
            by_group[plan.groups[piece.parameter]].append(parameter)
        self._optimizer = plan.recipe.build(by_group)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return views of a vector like :attr:`flat`, one per slice."""
        return [part.view(piece.shape) for piece, part in places(self.slices, flat)]

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of parameters and optimizer state."""
        tensors = [v for state in self._optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        copies = sum(parameter.nbytes for parameter, _ in self._copies)
        return self.flat.nbytes + copies, sum(tensor.nbytes for tensor in tensors)

    @torch.no_grad()
    def fill(self, flat: Tensor) -> None:
        """Set the parameters."""
        self.flat.copy_(flat)
        for parameter, view in self._copies:
            parameter.copy_(view)

    @torch.no_grad()
    def step(self, gradient: Tensor, present: Sequence[bool], hyper: Tensor, lr_factor: float = 1.0) -> None:
        """Make one optimizer step.

        Args:
            gradient: like :attr:`flat`.
            present: whether each slice has a gradient; others are skipped, like ``grad=None``.
            hyper: options of the groups, see :class:`GroupHyperParameters`.
            lr_factor: scales learning rates in this step.
        """
        groups = self._optimizer.param_groups
        self._plan.hyper.write(groups, hyper)
        if lr_factor != 1.0:
            for group in groups:
                group["lr"] = group["lr"] * lr_factor
        for parameter, part, has in zip(self._parameters, self.split(gradient), present, strict=True):
            parameter.grad = part.to(parameter.dtype) if has else None
        with torch.enable_grad():  # as in user code
            self._optimizer.step()
        self._optimizer.zero_grad()
        for parameter, view in self._copies:
            view.copy_(parameter)

    def state(self) -> list[State]:
        """Return the optimizer state of each slice; empty where it has none."""
        return states_of(self._optimizer, self._parameters)

    def load(self, states: Sequence[State]) -> None:
        """Replace the optimizer state of each slice."""
        self._optimizer.state.clear()
        put_states(self._optimizer, self._parameters, states)


def states_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[State]:
    """Return the optimizer states of parameters; empty where there is none."""
    return [dict(optimizer.state.get(parameter, {})) for parameter in parameters]


def put_states(optimizer: Optimizer, parameters: Sequence[Tensor], states: Sequence[State]) -> None:
    """Set the optimizer states of parameters, where there are any, on the devices of these."""
    for parameter, state in zip(parameters, states, strict=True):
        if state:
            optimizer.state[parameter] = {
                key: value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
                for key, value in state.items()
            }


def split_state(plan: ShardPlan, states: Sequence[State]) -> list[list[State]]:
    """Split the states of whole parameters into slices, for each server."""
    return [[_rows(plan, piece, states[piece.parameter]) for piece in held] for held in plan.held]


def _rows(plan: ShardPlan, piece: Slice, state: State) -> State:
    whole = plan.shapes[piece.parameter]
    return {
        key: value[piece.start : piece.stop].clone() if _is_alike(value, whole) and whole else value
        for key, value in state.items()
    }


def join_state(plan: ShardPlan, states: Sequence[Sequence[State]]) -> list[State]:
    """Join the states of slices, for each server, into those of whole parameters."""
    return [_joined(sorted(each, key=lambda pair: pair[0].start)) for each in _by_parameter(plan, states)]


def join_norms(plan: ShardPlan, norms: Sequence[Tensor]) -> Tensor:
    """Join the norms of slices, for each server, into those of whole parameters, without missing (negative) ones."""
    parts = _by_parameter(plan, [of_server.tolist() for of_server in norms])
    there = [[norm for _, norm in each] for each in parts if not each[0][1] < 0]
    return torch.tensor([each[0] if len(each) == 1 else math.hypot(*each) for each in there], dtype=plan.dtype)


def _by_parameter(plan: ShardPlan, values: Sequence[Sequence[T]]) -> list[list[tuple[Slice, T]]]:
    """Return the slices of each parameter, with values that are given for each slice of each server."""
    found: list[list[tuple[Slice, T]]] = [[] for _ in plan.names]
    for held, of_server in zip(plan.held, values, strict=True):
        for piece, value in zip(held, of_server, strict=True):
            found[piece.parameter].append((piece, value))
    return found


def _joined(parts: list[tuple[Slice, State]]) -> State:
    first, state = parts[0]
    if len(parts) == 1:
        return dict(state)
    return {
        key: torch.cat([other[key] for _, other in parts]) if _is_alike(value, first.shape) else value
        for key, value in state.items()
    }


def refuse_unserved(optimizer: Optimizer) -> None:
    """Raise for an optimizer that needs a closure, takes sparse gradients only or has complex parameters.

    Raises:
        ValueError: with what to use instead.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise ValueError(needs_closure(type(optimizer).__name__))
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam takes sparse gradients only, but a server reconstructs the dense gradient from the pushed "
            "rows. Use Adagrad, which leaves rows without a gradient unchanged, or strategy=ddp."
        )
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if parameter.is_complex():
            raise ValueError(
                f"A parameter of shape {tuple(parameter.shape)} is complex, which servers do not hold. Store it as "
                "real numbers (torch.view_as_real), or use strategy=ddp."
            )


def _is_alike(value: Any, shape: Shape) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == shape


Groups = Sequence[Mapping[str, Any]]


class GroupHyperParameters:
    """Reads and writes options of parameter groups that are numbers or tuples of numbers.

    Schedulers on a worker may change them; the server's optimizer uses those of the push.

    Args:
        groups: at the start of training, when numeric options are detected.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = len(groups)
        self._kinds = [
            (index, key, kind)
            for index, group in enumerate(groups)
            for key, value in sorted(group.items())
            if key != "params" and (kind := _kind(value))
        ]

    @property
    def size(self) -> int:
        """Length of the vector."""
        return sum(len(kind) for _, _, kind in self._kinds)

    def read(self, groups: Groups) -> Tensor:
        """Return the options of ``groups``, float64 ``(size,)``.

        Raises:
            ValueError: if groups or kinds of options changed since the start.
        """
        if len(groups) != self._groups:
            raise ValueError(
                f"The optimizer has {len(groups)} parameter groups, {self._groups} when training began. Servers do not "
                "support new groups: create all in configure_optimizers, including frozen ones (requires_grad=False)."
            )
        values: list[float] = []
        for index, key, kind in self._kinds:
            value = groups[index].get(key)
            if len(_kind(value)) != len(kind):
                raise ValueError(
                    f"Option {key!r} of parameter group {index} is {value!r}, another kind of value than when training "
                    "began. Servers support changes of numbers only."
                )
            values += [float(each) for each in (value if isinstance(value, tuple | list) else (value,))]
        return torch.tensor(values, dtype=torch.float64)

    def write(self, groups: Sequence[dict[str, Any]], vector: Tensor) -> None:
        """Set the options of ``groups`` in place."""
        values = iter(vector.tolist())
        for index, key, kind in self._kinds:
            numbers = [cast(next(values)) for cast in kind]
            old = groups[index].get(key)
            groups[index][key] = type(old)(numbers) if isinstance(old, tuple | list) else numbers[0]


def _kind(value: Any) -> tuple[type, ...]:
    """Return the types of an option's numbers; empty if it is not numeric."""
    if isinstance(value, bool | int | float):
        return (type(value),)
    if isinstance(value, Tensor) and value.dim() == 0:
        return (float,)
    if isinstance(value, tuple | list) and all(isinstance(each, int | float) for each in value):
        return tuple(float if isinstance(each, float) else type(each) for each in value)
    return ()


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options without parameters; scalar tensors (such as a learning rate) as numbers."""
    return {
        key: float(value) if isinstance(value, Tensor) and value.dim() == 0 else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
