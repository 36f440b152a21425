"""Takes pulled parameters when they are needed: the rest is on its way while the first layers compute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.strategies.parameter_server.messages.wire import PART, Link, Sending
from trainwright.strategies.parameter_server.server.shard import ShardPlan
from trainwright.strategies.parameter_server.server.sharder import Slice

# References to the memory of a parameter: its own, and the one of who looks.
_ALONE = 2


class _Coming(NamedTuple):
    """A part on its way."""

    sending: Sending
    slices: Sequence[Slice]
    values: Tensor


class LatePull:
    """Parameters on their way, part by part, each of which is taken before anything can see it.

    What sees parameters is, in a forward pass, the forward of the module that has them, and every function and method
    of torch that they are given to (:meth:`watch`). Everything else asks for all of them first (:meth:`settle`).

    Args:
        plan: with parts.
        parameters: in the order of the plan.
        flats: for each server memory to receive into.
        module: whose parameters they are.
        links: to each server.
    """

    def __init__(
        self,
        plan: ShardPlan,
        parameters: Sequence[Tensor],
        flats: Sequence[Tensor],
        module: nn.Module,
        links: Sequence[Link],
    ) -> None:
        self._plan, self._parameters, self._flats, self._links = plan, parameters, flats, links
        self._coming: dict[tuple[int, int], _Coming] = {}
        self._keys: dict[int, list[tuple[int, int]]] = {}
        for server, held in enumerate(plan.held):
            for number, part in enumerate(plan.pulled_parts(server)):
                for index in {held[each].parameter for each in part.slices}:
                    self._keys.setdefault(id(parameters[index]), []).append((server, number))
        self._handles = []
        for each in module.modules():
            own = [id(p) for p in each.parameters(recurse=False) if id(p) in self._keys]
            if own:
                self._handles.append(each.register_forward_pre_hook(_Take(self, own)))

    @property
    def has_all(self) -> bool:
        """Whether nothing is on its way."""
        return not self._coming

    @property
    def may_wait(self) -> bool:
        """Whether no other tensor shares the memory of a parameter: who reads it through that would see the old one."""
        count: Any = getattr(torch._C, "_storage_Use_Count", None)
        return count is not None and all(count(p.untyped_storage()._cdata) <= _ALONE for p in self._parameters)

    def begin(self) -> None:
        """Begin to receive all parts."""
        for server, flat in enumerate(self._flats):
            for number, part in enumerate(self._plan.pulled_parts(server)):
                values = flat[part.start : part.stop]
                slices = [self._plan.held[server][each] for each in part.slices]
                sending = self._links[server].receive(values, PART + number)
                self._coming[server, number] = _Coming(sending, slices, values)

    def take(self, parameter: int) -> None:
        """Wait for the parts of a parameter, by ``id``."""
        for key in self._keys.get(parameter, ()):
            self._take(key)

    def settle(self) -> None:
        """Wait for all parts."""
        for key in list(self._coming):
            self._take(key)

    @torch.no_grad()
    def _take(self, key: tuple[int, int]) -> None:
        coming = self._coming.pop(key, None)
        if coming is None:
            return
        coming.sending.wait()
        put_slices(coming.slices, coming.values, self._parameters)

    def watch(self) -> TorchFunctionMode:
        """A context in which a parameter is waited for where a function of torch gets it."""
        return _Watch(self)

    def close(self) -> None:
        """Leave the module."""
        self._coming = {}
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _Take:
    """Before the forward of a module: takes its parameters. A copy that is pickled with the module takes nothing."""

    def __init__(self, late: LatePull | None, own: Sequence[int]) -> None:
        self._late, self._own = late, own

    def __reduce__(self) -> tuple[Any, ...]:
        return _Take, (None, ())

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._late is not None and not self._late.has_all:
            for each in self._own:
                self._late.take(each)


class _Watch(TorchFunctionMode):
    def __init__(self, late: LatePull) -> None:
        self._late = late

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._late.has_all:
            self._look(args)
            self._look((kwargs or {}).values())
        return func(*args, **(kwargs or {}))

    def _look(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self._late.take(id(value))
            elif isinstance(value, tuple | list):
                self._look(value)
            elif isinstance(value, dict):
                self._look(value.values())


@torch.no_grad()
def put_slices(slices: Sequence[Slice], values: Tensor, parameters: Sequence[Tensor]) -> None:
    """Put values, flat, one slice after the other, into parameters."""
    for piece, value in zip(slices, values.split([piece.numel for piece in slices]), strict=True):
        parameter = parameters[piece.parameter]
        target = parameter[piece.start : piece.stop] if parameter.dim() else parameter
        target.copy_(value.view(piece.shape))
