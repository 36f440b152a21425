"""Pulls that are completed on first use, overlapping with the first layers of the next forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.strategies.parameter_server.messages.wire import PART, Link, Sending
from trainwright.strategies.parameter_server.server.shard import ShardPlan
from trainwright.strategies.parameter_server.server.sharder import Slice, places

# References to a parameter's storage: its own and the query's.
_ALONE = 2


class DeferredPull:
    """Parameters pending part by part, each completed before it can be read.

    In a forward pass, readers are the forward of the module that owns a parameter, and torch functions and methods that
    get it as an argument (:meth:`watch`). All others call :meth:`settle` first.

    Args:
        plan: with parts.
        parameters: in plan order.
        flats: receive buffers of each server.
        module: of the parameters.
        links: to each server.
        versions: see :func:`put_slices`.
    """

    def __init__(
        self,
        plan: ShardPlan,
        parameters: Sequence[Tensor],
        flats: Sequence[Tensor],
        module: nn.Module,
        links: Sequence[Link],
        versions: dict[int, int],
    ) -> None:
        self._plan, self._parameters, self._flats, self._links = plan, parameters, flats, links
        self._versions = versions
        self._pending: dict[tuple[int, int], Sending] = {}  # by server and part
        self._keys: dict[int, list[tuple[int, int]]] = {}
        for server, held in enumerate(plan.held):
            for number, part in enumerate(plan.pulled_parts(server)):
                for index in {held[each].parameter for each in part.slices}:
                    self._keys.setdefault(id(parameters[index]), []).append((server, number))
        self._hooks = ExitStack()
        for each in module.modules():
            own = [id(p) for p in each.parameters(recurse=False) if id(p) in self._keys]
            if own:
                self._hooks.enter_context(each.register_forward_pre_hook(_PullBeforeForward(self, own)))

    @property
    def has_all(self) -> bool:
        """True if nothing is pending."""
        return not self._pending

    @property
    def may_wait(self) -> bool:
        """True if no other tensor shares a parameter's memory, through which it could be read too early."""
        count: Any = getattr(torch._C, "_storage_Use_Count", None)
        return count is not None and all(count(p.untyped_storage()._cdata) <= _ALONE for p in self._parameters)

    def begin(self) -> None:
        """Start receiving all parts."""
        for server, flat in enumerate(self._flats):
            for number, part in enumerate(self._plan.pulled_parts(server)):
                values = flat[part.start : part.stop]
                self._pending[server, number] = self._links[server].receive(values, PART + number)

    def take(self, parameter: int) -> None:
        """Wait for the parts of a parameter, by ``id``."""
        for key in self._keys.get(parameter, ()):
            self._take(key)

    def settle(self) -> None:
        """Wait for all parts."""
        for key in list(self._pending):
            self._take(key)

    @torch.no_grad()
    def _take(self, key: tuple[int, int]) -> None:
        sending = self._pending.pop(key, None)
        if sending is None:
            return
        sending.wait()
        server, part = key[0], self._plan.pulled_parts(key[0])[key[1]]
        values = self._flats[server][part.start : part.stop]
        put_slices(self._plan.held[server][part.first : part.last], values, self._parameters, self._versions)

    def watch(self) -> TorchFunctionMode:
        """Return a context in which torch functions wait for pending parameters among their arguments."""
        return _PullOnAccess(self)

    def close(self) -> None:
        """Remove the hooks."""
        self._pending = {}
        self._hooks.close()


class _PullBeforeForward:
    """Forward pre-hook that completes a module's parameters. A pickled copy does nothing."""

    def __init__(self, late: DeferredPull | None, own: Sequence[int]) -> None:
        self._late, self._own = late, own

    def __reduce__(self) -> tuple[Any, ...]:
        return _PullBeforeForward, (None, ())

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._late is not None and not self._late.has_all:
            for each in self._own:
                self._late.take(each)


class _PullOnAccess(TorchFunctionMode):
    def __init__(self, late: DeferredPull) -> None:
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
def put_slices(
    slices: Sequence[Slice], values: Tensor, parameters: Sequence[Tensor], versions: dict[int, int] | None = None
) -> None:
    """Copy concatenated values of slices into parameters, whose versions after it go into ``versions``, by index."""
    for piece, value in places(slices, values):
        parameter = parameters[piece.parameter]
        target = parameter[piece.start : piece.stop] if parameter.dim() else parameter
        target.copy_(value.view(piece.shape))
        if versions is not None:
            versions[piece.parameter] = parameter._version
