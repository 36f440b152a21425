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
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.averaging.background import Background
from trainwright.strategies.contract.collectives.flat import all_gather, reduce_scatter
from trainwright.strategies.contract.communication.options import ALL_REDUCE, HIERARCHICAL, IN_PARTS
from trainwright.strategies.contract.groups import new_subgroup

Mean = Callable[[Tensor], None]
"""In-place mean of a flat tensor over ranks; a collective, with tensors of equal size."""


def _all_reduce_mean(flat: Tensor, group: dist.ProcessGroup | None) -> None:
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)


def _scatter_gather_mean(
    flat: Tensor, group: dist.ProcessGroup | None, across: dist.ProcessGroup | None = None
) -> None:
    """Replace a tensor by its mean over a group, and over those of other nodes that reduce the same part, if any."""
    parts = dist.get_world_size(group)
    own = _scattered(flat, group, parts)
    if across is not None:
        dist.all_reduce(own, group=across)
    own /= parts * (1 if across is None else dist.get_world_size(across))
    is_even = own.numel() * parts == flat.numel()
    whole = flat if is_even else own.new_empty(own.numel() * parts)
    all_gather(whole, own, group=group)
    if not is_even:
        flat.copy_(whole[: flat.numel()])


def _scattered(flat: Tensor, group: dist.ProcessGroup | None, parts: int) -> Tensor:
    """Return this rank's part of the sum, zero-padded to equal parts."""
    missing = -flat.numel() % parts
    given = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
    if flat.device.type == "cpu":
        # gloo's reduce-scatter is a full all-reduce; an all-to-all sends half of that.
        received = torch.empty_like(given)
        dist.all_to_all_single(received, given, group=group)
        rows: list[Tensor] = list(received.view(parts, -1))
        for row in rows[1:]:
            rows[0] += row
        return rows[0]
    own = given.new_empty(given.numel() // parts)
    reduce_scatter(own, given, group=group)
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
            within, across = self._group("within", self._within), self._group("across", self._across)
            return partial(_scatter_gather_mean, group=within, across=across)
        mean = _all_reduce_mean if way == ALL_REDUCE else _scatter_gather_mean
        return partial(mean, group=self._group("all", self._groups))

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
