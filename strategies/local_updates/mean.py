"""Means over replicas of tensors by name, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.checkpoint.exchange.distinct import all_gather_values

Alike = Callable[[str], str]
"""From a name to what says with which others it may share a bucket.

Ranks of one replica may hold copies of a parameter (tied weights on two stages, norms on tensor ranks). Their means
must have the same bits, and bits depend on the place in a bucket: so copies are averaged in buckets that are alike.
"""


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent as one.

    Args:
        names: theirs, in order.
        shapes: theirs, of what this rank holds.
        dtype: in which they are averaged: float32, float64 for tensors that have it.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    def join(self, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """One flat copy of the tensors, on ``device``."""
        return torch.cat([tensors[name].detach().reshape(-1).to(device, self.dtype) for name in self.names])

    def split(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Name and view of each in ``flat``."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        for name, shape, piece in zip(self.names, self.shapes, flat.split(sizes), strict=True):
            yield name, piece.view(shape)


def make_buckets(tensors: Mapping[str, Tensor], alike: Alike, bucket_bytes: int) -> list[Bucket]:
    """Buckets of at most ``bucket_bytes`` (one tensor at least), in the order of ``tensors``; empty ones left out.

    Args:
        tensors: what this rank holds, by name.
        alike: see :data:`Alike`.
        bucket_bytes: as they are sent.
    """
    open_buckets: dict[tuple[str, torch.dtype], list[str]] = {}
    filled: dict[tuple[str, torch.dtype], int] = {}
    closed: list[Bucket] = []

    def close(kind: tuple[str, torch.dtype]) -> None:
        names = open_buckets.pop(kind)
        closed.append(Bucket(tuple(names), tuple(tuple(tensors[name].shape) for name in names), kind[1]))

    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        kind = alike(name), torch.promote_types(tensor.dtype, torch.float32)
        size = tensor.numel() * kind[1].itemsize
        if kind in open_buckets and filled[kind] + size > bucket_bytes:
            close(kind)
        if kind not in open_buckets:
            open_buckets[kind], filled[kind] = [], 0
        open_buckets[kind].append(name)
        filled[kind] += size
    for kind in list(open_buckets):
        close(kind)
    return closed


class ReplicaMean:
    """Exact means over the ranks that hold the same parts in other replicas, with the same bits on each of them.

    Args:
        group: these ranks; ``None``: there is one replica, whose tensors are their own means.
        device: where collectives run.
        alike: see :data:`Alike`.
        bucket_bytes: how much is sent at once.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, alike: Alike, bucket_bytes: int) -> None:
        self.group = group
        self.device = device
        self._alike = alike
        self._bucket_bytes = bucket_bytes

    def buckets(self, tensors: Mapping[str, Tensor]) -> list[Bucket]:
        """How tensors are sent."""
        return make_buckets(tensors, self._alike, self._bucket_bytes)

    @torch.no_grad()
    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """New tensors, the means of ``tensors``, like them in shape, dtype and device. A collective."""
        found = {name: tensor for name, tensor in tensors.items() if not tensor.numel()}
        for bucket in self.buckets(tensors):
            flat = bucket.join(tensors, self.device)
            self._average(flat)
            # Each its own memory: one that outlives the others must not keep them all.
            found.update(
                (name, piece.to(tensors[name].device, tensors[name].dtype, copy=True))
                for name, piece in bucket.split(flat)
            )
        return {name: found[name] for name in tensors}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace tensors by their means, in place. A collective."""
        if self.group is None:
            return
        for bucket in self.buckets(tensors):
            flat = bucket.join(tensors, self.device)
            self._average(flat)
            for name, piece in bucket.split(flat):
                tensors[name].copy_(piece)

    def common(self, names: Sequence[str]) -> list[str]:
        """Those of ``names`` that every replica has, in order. A collective."""
        if self.group is None:
            return list(names)
        everyone: list[list[str]] = all_gather_values(list(names), self.group, self.device)
        shared = set.intersection(*map(set, everyone))
        return [name for name in names if name in shared]

    def _average(self, flat: Tensor) -> None:
        if self.group is not None:
            dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self.group)
