"""Means of named tensors over replicas, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.checkpoint.exchange.distinct import all_gather_values
from trainwright.strategies.contract.collectives.bucketing import bucketed

TagOf = Callable[[str], str]
"""Returns the tag of a name; tensors with different tags do not share a bucket.

Ranks of one replica may hold copies of a parameter (tied weights on two stages, norms on tensor ranks). Their means
must be bit-identical, and bits depend on the position in a bucket, so copies need buckets with the same content.
"""


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent as one.

    Args:
        names: of the tensors, in order.
        shapes: of the local tensors.
        dtype: of the average: float32, or float64 if a tensor has it.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    def join(self, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Return a flat copy of the tensors on ``device``."""
        return torch.cat([tensors[name].detach().reshape(-1).to(device, self.dtype) for name in self.names])

    def split(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield name and view of each tensor in ``flat``."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        for name, shape, piece in zip(self.names, self.shapes, flat.split(sizes), strict=True):
            yield name, piece.view(shape)


class ReplicaMean:
    """Exact means over the ranks that hold the same parts in other replicas, bit-identical on each.

    Args:
        group: these ranks; ``None``: a single replica.
        device: of collectives.
        tag_of: see :data:`TagOf`.
        bucket_bytes: of a message.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, tag_of: TagOf, bucket_bytes: int) -> None:
        self.group = group
        self.device = device
        self._tag_of = tag_of
        self._bucket_bytes = bucket_bytes

    def buckets(self, tensors: Mapping[str, Tensor]) -> list[Bucket]:
        """Return the buckets in which tensors are sent."""
        dtypes = {n: torch.promote_types(t.dtype, torch.float32) for n, t in tensors.items() if t.numel()}
        groups = bucketed(
            dtypes,
            lambda name: (self._tag_of(name), dtypes[name]),
            lambda name: tensors[name].numel() * dtypes[name].itemsize,
            self._bucket_bytes,
        )
        return [Bucket(tuple(g), tuple(tuple(tensors[name].shape) for name in g), dtypes[g[0]]) for g in groups]

    @torch.no_grad()
    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the means of ``tensors`` as new tensors of the same shapes, dtypes and devices. A collective."""
        means = {name: tensor.clone() for name, tensor in tensors.items()}
        self.average(means)
        return means

    @torch.no_grad()
    def average(self, tensors: Mapping[str, Tensor]) -> None:
        """Average tensors in place. A collective."""
        if self.group is None:
            return
        for bucket in self.buckets(tensors):
            flat = bucket.join(tensors, self.device)
            dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self.group)
            for name, piece in bucket.split(flat):
                tensors[name].copy_(piece)

    def common(self, names: Sequence[str]) -> list[str]:
        """Return those of ``names`` that every replica has, in order. A collective."""
        if self.group is None:
            return list(names)
        everyone: list[list[str]] = all_gather_values(list(names), self.group, self.device)
        shared = set.intersection(*map(set, everyone))
        return [name for name in names if name in shared]
