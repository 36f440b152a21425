"""Counts the collectives that this rank takes part in, whoever starts them: Python, C++ (DDP) or FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operators of torch.ops.c10d and torch.ops._c10d_functional -> what people call them.
NAMES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "all_reduce": "all_reduce",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
}


@dataclass(frozen=True)
class Collective:
    """One call.

    Args:
        name: what people call it.
        elements: of the largest tensor: what is reduced, or what has been gathered.
    """

    name: str
    elements: int


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            if name != "wait_tensor":
                sizes = [leaf.numel() for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                self.seen.append(Collective(NAMES.get(name, name), max(sizes, default=0)))
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded() -> Iterator[list[Collective]]:
    """Every collective that this rank takes part in inside, in order."""
    mode = _Recorder()
    with mode:
        yield mode.seen
