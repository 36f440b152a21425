"""Tells of every collective that this process starts, whoever starts it; free while nobody listens.

Python's ``torch.distributed``, the reducer of ``DistributedDataParallel`` (C++), FSDP2, DTensor, functional collectives
(compiled or not), and sends of a pipeline all call an operator of the namespace ``c10d``, which finds the backend of
the tensor's device. While somebody listens, a kernel stands before each of these operators, under the dispatch key
``BackendSelect``: the one that every call passes on any device and in any mode (autograd's keys are left out in
inference mode), and below those where ``FakeTensor`` and other modes take calls that send nothing. Tensors of other
operators are not touched. It costs some microseconds a collective.

What does not pass there: calls of a backend object (``ProcessGroupGloo(...).send``), stores, sockets, and kernels that
write into another device's memory.
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
    """One collective as this rank starts it.

    Args:
        kind: of :data:`~trainwright.strategies.contract.communication.costs.KINDS`, or ``"barrier"``.
        group: whose ranks take part.
        size: bytes: S of the table in :mod:`~trainwright.strategies.contract.communication.costs`.
        elements: of the largest tensor: what is reduced, or what has been gathered.
        device: type of the device that the tensors are on.
        root: rank of the group that sends or gets all; 0 where there is none.
    """

    kind: str
    group: dist.ProcessGroup
    size: int
    elements: int
    device: str
    root: int = 0

    @property
    def place(self) -> int:
        """How many ranks behind the root this one is."""
        return (self.group.rank() - self.root) % self.group.size()

    @property
    def backend(self) -> str:
        """Name of the backend that does it, such as ``"gloo"``."""
        name: str = self.group._get_backend(torch.device(self.device)).name()
        return name


Listener = Callable[[CollectiveCall], None]


@dataclass(frozen=True)
class _Operator:
    """How to read the arguments of an operator.

    Args:
        kind: of the call.
        tensors: index of the argument that is S, or a part of it.
        per_rank: whether that is what one of the ranks has of S.
        root: index of the argument that is the root.
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
# Nothing is sent, but for a few bytes.
_SILENT = {"recv_", "recv_any_source_", "monitored_barrier_", "check_for_nan"}


def unknown_operators() -> list[str]:
    """Operators of ``c10d`` in this version of torch whose calls nobody is told of; empty where all are known."""
    names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    ours = {name.partition(".")[0] for namespace, _, name in names if namespace == "c10d"}
    return sorted(ours - _OPERATORS.keys() - _SILENT)


def listen(listener: Listener) -> Callable[[], None]:
    """Have ``listener`` called with each collective before it begins, in the thread that starts it.

    Returns:
        How to end that; may be called again.
    """
    _Interception.add(listener)
    return partial(_Interception.remove, listener)


class _Interception:
    """The kernels before the operators, while somebody listens."""

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
                    _stand_before(cls.library, name, operator)

    @classmethod
    def remove(cls, listener: Listener) -> None:
        with cls.lock:
            cls.listeners = tuple(each for each in cls.listeners if each is not listener)
            if not cls.listeners and cls.library is not None:
                cls.library._destroy()
                cls.library = None


def _stand_before(library: torch.library.Library, name: str, operator: _Operator) -> None:
    usual = getattr(torch.ops.c10d, name).default
    group_index = next(i for i, given in enumerate(usual._schema.arguments) if given.name == "process_group")
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        call = _read(operator, args, dist.ProcessGroup.unbox(args[group_index]), args[group_index + 1 :])
        for listener in _Interception.listeners:
            listener(call)
        return usual.redispatch(keyset & below, *args, **kwargs)

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
    """Bytes of the input of an all-to-all that are not for the rank itself."""
    if not splits or not isinstance(splits[0], list):
        return sum(num_bytes(tensor) for rank, tensor in enumerate(tensors) if rank != group.rank())
    size = num_bytes(tensors[0])
    rows: list[int] = splits[1]
    if not sum(rows):
        return size - size // group.size()  # equal parts, or nothing at all
    return size - size * rows[group.rank()] // sum(rows)


def num_bytes(tensor: Tensor) -> int:
    """Bytes of the values of a tensor; of a sparse one, of its indices and values."""
    if tensor.is_sparse:
        return num_bytes(tensor._indices()) + num_bytes(tensor._values())
    return tensor.numel() * tensor.element_size()
