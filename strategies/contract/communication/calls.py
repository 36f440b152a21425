"""Listener for every collective that this process starts; no overhead without listeners.

Python's ``torch.distributed``, the reducer of ``DistributedDataParallel`` (C++), FSDP2, DTensor, functional collectives
(compiled or not) and pipeline sends all dispatch an operator of the ``c10d`` namespace. While there are listeners, a
kernel intercepts these operators at the dispatch key ``BackendSelect``: every call passes it on any device and in any
mode (inference mode skips autograd's keys), and it is below ``FakeTensor`` and other modes that send nothing. The cost
is a few microseconds per collective.

Not seen: direct calls of a backend object (``ProcessGroupGloo(...).send``), stores, sockets, and kernels that write
into another device's memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class CollectiveCall:
    """A collective started by this rank.

    Args:
        kind: of :data:`~trainwright.strategies.contract.communication.costs.KINDS`, or ``"barrier"``.
        group: of the collective.
        size: bytes: S of the table in :mod:`~trainwright.strategies.contract.communication.costs`.
        elements: of the largest tensor: the reduced or gathered one.
        device: device type of the tensors.
        root: group rank of the source or destination; 0 if there is none.
    """

    kind: str
    group: dist.ProcessGroup
    size: int
    elements: int
    device: str
    root: int = 0

    @property
    def place(self) -> int:
        """Distance of this rank from the root."""
        return (self.group.rank() - self.root) % self.group.size()

    @property
    def backend(self) -> str:
        """Name of the backend, such as ``"gloo"``."""
        name: str = self.group._get_backend(torch.device(self.device)).name()
        return name


Listener = Callable[[CollectiveCall], None]


@dataclass(frozen=True)
class _Operator:
    """Schema of an operator's arguments.

    Args:
        kind: of the call.
        tensors: index of the argument with the tensors of S.
        per_rank: whether they are one rank's part of S.
        root: index of the root argument.
    """

    kind: str
    tensors: int = 0
    per_rank: bool = False
    root: int | None = None


_OPERATORS = {
    "allreduce_": _Operator("all_reduce"),
    "allreduce_coalesced_": _Operator("all_reduce"),
    "_allgather_base_": _Operator("all_gather", 1, per_rank=True),
    "allgather_": _Operator("all_gather", 1, per_rank=True),
    "allgather_coalesced_": _Operator("all_gather", 1, per_rank=True),
    "allgather_into_tensor_coalesced_": _Operator("all_gather", 1, per_rank=True),
    "_reduce_scatter_base_": _Operator("reduce_scatter", 1),
    "reduce_scatter_": _Operator("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": _Operator("reduce_scatter", 1),
    "alltoall_": _Operator("all_to_all", 1),
    "alltoall_base_": _Operator("all_to_all", 1),
    "broadcast_": _Operator("broadcast", root=2),
    "reduce_": _Operator("reduce", root=3),
    "gather_": _Operator("gather", 1, root=3),
    "scatter_": _Operator("scatter", 0, root=3),
    "send": _Operator("send"),
    "barrier": _Operator("barrier"),
}
# These send a few bytes at most.
_SILENT = {"recv_", "recv_any_source_", "monitored_barrier_", "check_for_nan"}


def unknown_operators() -> list[str]:
    """Return operators of ``c10d`` in this version of torch that are not reported."""
    names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    ours = {name.partition(".")[0] for namespace, _, name in names if namespace == "c10d"}
    return sorted(ours - _OPERATORS.keys() - _SILENT)


def listen(listener: Listener) -> Callable[[], None]:
    """Call ``listener`` with each collective before it starts, in the starting thread; returns a function to stop."""
    _Interception.add(listener)
    return partial(_Interception.remove, listener)


class _Interception:
    """Intercepting kernels, installed while there are listeners."""

    listeners: tuple[Listener, ...] = ()
    library: torch.library.Library | None = None
    lock = threading.Lock()

    @classmethod
    def add(cls, listener: Listener) -> None:
        with cls.lock:
            cls.listeners = (*cls.listeners, listener)
            if cls.library is None:
                cls.library = torch.library.Library("c10d", "IMPL")
                for name, operator in _OPERATORS.items():
                    _intercept(cls.library, name, operator)

    @classmethod
    def remove(cls, listener: Listener) -> None:
        with cls.lock:
            cls.listeners = tuple(each for each in cls.listeners if each is not listener)
            if not cls.listeners and cls.library is not None:
                cls.library._destroy()
                cls.library = None


def _intercept(library: torch.library.Library, name: str, operator: _Operator) -> None:
    original = getattr(torch.ops.c10d, name).default
    group_index = next(i for i, given in enumerate(original._schema.arguments) if given.name == "process_group")
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        call = _read(operator, args, dist.ProcessGroup.unbox(args[group_index]), args[group_index + 1 :])
        for listener in _Interception.listeners:
            listener(call)
        return original.redispatch(keyset & below, *args, **kwargs)

    library.impl(name, kernel, "BackendSelect", with_keyset=True)


def _read(operator: _Operator, args: Sequence[Any], group: dist.ProcessGroup, behind: Sequence[Any]) -> CollectiveCall:
    tensors, kind = list(_leaves(args[operator.tensors])), operator.kind
    if any(tensor.is_sparse for tensor in tensors):
        kind, size = "all_gather", sum(map(num_bytes, tensors)) * group.size()
    elif kind == "all_to_all":
        size = _for_others(tensors, group, behind)
    else:
        size = sum(map(num_bytes, tensors)) * (group.size() if operator.per_rank else 1)
    every = [tensor for given in args[:2] for tensor in _leaves(given)]
    root = 0 if operator.root is None else args[operator.root]
    elements = max((tensor.numel() for tensor in every), default=0)
    return CollectiveCall(kind, group, size, elements, every[0].device.type, root)


def _leaves(given: Any) -> Iterable[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _leaves(each)


def _for_others(tensors: list[Tensor], group: dist.ProcessGroup, splits: Sequence[Any]) -> int:
    """Return the bytes of an all-to-all's input that leave this rank."""
    if not splits or not isinstance(splits[0], list):
        return sum(num_bytes(tensor) for rank, tensor in enumerate(tensors) if rank != group.rank())
    size = num_bytes(tensors[0])
    rows: list[int] = splits[1]
    if not sum(rows):
        return size - size // group.size()  # no splits: equal parts
    return size - size * rows[group.rank()] // sum(rows)


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; of a sparse one, those of its indices and values."""
    if tensor.is_sparse:
        return num_bytes(tensor._indices()) + num_bytes(tensor._values())
    return tensor.numel() * tensor.element_size()
