"""Counts the bytes that this rank sends, whoever starts the collective: Python, C++ (DDP), FSDP2 or DTensor.

A collective over n ranks counts as what each rank sends in the best algorithm: all-gather and reduce-scatter of
S bytes (n - 1) / n S, all-reduce twice that, all-to-all what is not for the rank itself, a broadcast (n - 1) / n S on
average. Point to point, the sender counts. A receive and a barrier send nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SILENT = {"barrier", "monitored_barrier_", "recv_", "recv_any_source_", "wait_tensor", "_wrap_tensor_autograd"}


class Traffic(TorchDispatchMode):
    """Counts what is sent while it is entered.

    Attributes:
        sent: bytes by kind of collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operations on local tensors, the collectives among them
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            if name not in _SILENT:
                kind, sent = _sent(name, args)
                self.sent[kind] = self.sent.get(kind, 0.0) + sent
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: Sequence[Any]) -> tuple[str, float]:
    """Kind of a collective and the bytes that this rank sends in it."""
    group = _group_of(args)
    ranks = group.size()
    share = (ranks - 1) / ranks
    if name in ("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_", "all_reduce_coalesced"):
        return "all_reduce", 2 * share * _bytes(args[0])
    if name in ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"):
        return "all_gather", (ranks - 1) * _bytes(args[1])
    if name in ("all_gather_into_tensor", "all_gather_into_tensor_coalesced"):
        return "all_gather", (ranks - 1) * _bytes(args[0])
    if name in ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"):
        return "reduce_scatter", share * _bytes(args[1])
    if name in ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"):
        return "reduce_scatter", share * _bytes(args[0])
    if name in ("alltoall_base_", "all_to_all_single"):
        tensor, splits = (args[1], args[4]) if name == "alltoall_base_" else (args[0], args[2])
        return "all_to_all", _bytes(tensor) * (1 - _own_part(splits, group))
    if name == "alltoall_":
        return "all_to_all", sum(_bytes(each) for rank, each in enumerate(args[1]) if rank != group.rank())
    if name in ("broadcast_", "broadcast"):
        return "broadcast", share * _bytes(args[0])
    if name == "send":
        return "send", _bytes(args[0])
    raise NotImplementedError(f"How many bytes {name} sends is not known. Add it to {__name__}.")


def _group_of(args: Sequence[Any]) -> dist.ProcessGroup:
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    name = next(value for value in reversed(args) if isinstance(value, str))
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _bytes(tensors: Tensor | Iterable[Any]) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))


def _own_part(splits: Sequence[int], group: dist.ProcessGroup) -> float:
    """The part of an all-to-all's input that stays here."""
    if not splits:
        return 1 / group.size()
    return splits[group.rank()] / sum(splits) if sum(splits) else 0.0
