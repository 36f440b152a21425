"""Means over replicas: all-reduce, reduce-scatter plus all-gather, or hierarchical across nodes.

==================  =================================================================================================
``all_reduce``      one all-reduce over all replicas
``reduce_scatter``  reduce-scatter, then all-gather. On the CPU every element is summed in rank order, so the result
                    does not depend on the bucket size
``hierarchical``    reduce-scatter within a node, all-reduce of each part across nodes, all-gather within a node. For S
                    bytes and m nodes of k ranks, a rank sends 2 (m - 1) / m S / k bytes across nodes instead of
                    2 (mk - 1) / mk S
==================  =================================================================================================

The hierarchical mean follows BlueConnect (Cho et al., MLSys 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.averaging.background import Background
from trainwright.strategies.averaging.compression.buckets import BUCKET_BYTES, ReplicaPart
from trainwright.strategies.contract.collectives.bucketing import bucketed
from trainwright.strategies.contract.collectives.flat import all_gather, reduce_scatter
from trainwright.strategies.contract.communication.options import ALL_REDUCE, HIERARCHICAL, IN_PARTS
from trainwright.strategies.contract.groups import new_subgroup

Mean = Callable[[Tensor], None]
"""In-place mean of a flat tensor over ranks; a collective, with tensors of equal size."""


class AllReduceMean:
    """Mean by one all-reduce.

    Args:
        group: process group; ``None``: all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def __call__(self, flat: Tensor) -> None:
        dist.all_reduce(flat, group=self._group)
        flat /= dist.get_world_size(self._group)


class ScatterGatherMean:
    """Mean by reduce-scatter and all-gather, optionally with an all-reduce across nodes in between.

    Args:
        group: process group; ``None``: all ranks.
        across: ranks of other nodes that reduce the same part; ``None``: single level.
    """

    def __init__(self, group: dist.ProcessGroup | None, across: dist.ProcessGroup | None = None) -> None:
        self._group, self._across = group, across
        self._parts = dist.get_world_size(group)
        self._ranks = self._parts * (1 if across is None else dist.get_world_size(across))

    def __call__(self, flat: Tensor) -> None:
        own = self._scattered(flat)
        if self._across is not None:
            dist.all_reduce(own, group=self._across)
        own /= self._ranks
        is_even = own.numel() * self._parts == flat.numel()
        whole = flat if is_even else own.new_empty(own.numel() * self._parts)
        all_gather(whole, own, group=self._group)
        if not is_even:
            flat.copy_(whole[: flat.numel()])

    def _scattered(self, flat: Tensor) -> Tensor:
        """Return this rank's part of the sum, zero-padded to equal parts."""
        missing = -flat.numel() % self._parts
        given = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
        if flat.device.type == "cpu":
            # gloo's reduce-scatter is a full all-reduce; an all-to-all sends half of that.
            received = torch.empty_like(given)
            dist.all_to_all_single(received, given, group=self._group)
            rows: list[Tensor] = list(received.view(self._parts, -1))
            for row in rows[1:]:
                rows[0] += row
            return rows[0]
        own = given.new_empty(given.numel() // self._parts)
        reduce_scatter(own, given, group=self._group)
        return own


class ReplicaMeans:
    """Means over the replicas of a layout; process groups are created on first use.

    Calls of :meth:`by` are collectives of all ranks, with the same arguments in the same order.

    Args:
        groups: ranks that hold copies of the same parameters, one list per group; together they cover all ranks.
        copies: replicas per node, see ``copies_of_a_node``; hierarchical means need more than 1 and fewer than all.
    """

    def __init__(self, groups: Sequence[Sequence[int]], copies: int) -> None:
        self._groups = [list(ranks) for ranks in groups]
        self._copies = copies
        self._made: dict[str, dist.ProcessGroup | None] = {}

    @property
    def ways(self) -> tuple[str, ...]:
        """Names of the available ways."""
        has_levels = 1 < self._copies < len(self._groups[0])
        return (ALL_REDUCE, IN_PARTS, *([HIERARCHICAL] if has_levels else []))

    @property
    def names(self) -> dict[tuple[int, ...], str]:
        """Names of the hierarchical process groups in communication reports, by ranks."""
        if HIERARCHICAL not in self.ways:
            return {}
        within = {tuple(ranks): "replicate-within" for ranks in self._within}
        return {**within, **{tuple(ranks): "replicate-across" for ranks in self._across}}

    def by(self, way: str) -> Mean:
        """Return the mean computed by one of :attr:`ways`. A collective of all ranks."""
        if way == HIERARCHICAL:
            return ScatterGatherMean(self._group("within", self._within), self._group("across", self._across))
        group = self._group("all", self._groups)
        return AllReduceMean(group) if way == ALL_REDUCE else ScatterGatherMean(group)

    @property
    def _within(self) -> list[list[int]]:
        starts = range(0, len(self._groups[0]), self._copies)
        return [ranks[start : start + self._copies] for ranks in self._groups for start in starts]

    @property
    def _across(self) -> list[list[int]]:
        return [ranks[place :: self._copies] for ranks in self._groups for place in range(self._copies)]

    def _group(self, name: str, lists: list[list[int]]) -> dist.ProcessGroup | None:
        if name not in self._made:
            # Always a new group: collectives in a background thread must not interleave with others.
            self._made[name] = new_subgroup(lists)
        return self._made[name]


class BucketedMean:
    """Mean of the locally optimized parts of parameters over replicas, bucket by bucket.

    Args:
        mean: over the replicas.
        device: that communicates; parts may be offloaded to another.
    """

    def __init__(self, mean: Mean, device: torch.device) -> None:
        self._mean, self._device = mean, device

    @torch.no_grad()
    def average(self, parts: Sequence[ReplicaPart]) -> None:
        """Average gradients in place, leaving out parts that have none on any rank. A collective."""
        found = [(part.bucket_tag, part.gradient) for part in parts if part.gradient is not None]
        buckets = bucketed(
            ((tag, gradient) for tag, gradient in found if gradient.numel()),
            lambda each: (each[0], each[1].dtype),
            lambda each: each[1].nbytes,
            BUCKET_BYTES,
        )
        for bucket in buckets:
            gradients = [gradient for _, gradient in bucket]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(self._device)
            self._mean(flat)
            for gradient, piece in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(piece.view(gradient.shape))


class OverlappedMean:
    """Average DDP buckets during backward, in a background thread (CPU) or a side stream (CUDA).

    Buckets are averaged one by one in the order in which they become ready, which is the same on all ranks.

    Args:
        mean: over the replicas, with process groups of its own.
        device: of the gradients.
    """

    def __init__(self, mean: Mean, device: torch.device) -> None:
        self._mean, self._device = mean, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = Background(device, "trainwright-mean") if self._stream is None else None

    def begin(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Start averaging a flat tensor in place; the future completes with the average."""
        if self._thread is not None:
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            self._thread.submit(lambda: self._average(buffer, done))
            return done
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        done = torch.futures.Future(devices=[self._device])
        with torch.cuda.stream(self._stream):
            self._mean(buffer)
            done.set_result(buffer)  # records an event on this stream, for consumers on others
        return done

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._thread.close()

    def _average(self, buffer: Tensor, done: torch.futures.Future[Tensor]) -> None:
        try:
            with torch.no_grad():
                self._mean(buffer)
        except Exception as error:
            done.set_exception(error)  # type: ignore[arg-type]
        else:
            done.set_result(buffer)
