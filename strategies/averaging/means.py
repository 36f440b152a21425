"""Means over ranks that hold copies: by one all-reduce, in parts, or in two levels over the borders of nodes.

==================  =================================================================================================
``all_reduce``      one all-reduce over all of them
``reduce_scatter``  each rank sums up a part, and all gather the parts. On the CPU every element is summed in the order
                    of the ranks, so that the size of buckets does not change a bit
``hierarchical``    reduce-scatter within a node, all-reduce of a part across nodes, all-gather within: of S bytes and
                    m nodes of k ranks a rank sends 2 (m - 1) / m S / k across nodes in place of 2 (mk - 1) / mk S
==================  =================================================================================================

The two levels are those of BlueConnect (Cho et al., MLSys 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.averaging.background import Background
from trainwright.strategies.averaging.compression.buckets import ReplicaPart
from trainwright.strategies.contract.collectives.flat import all_gather, reduce_scatter
from trainwright.strategies.contract.communication.options import ALL_REDUCE, HIERARCHICAL, IN_PARTS
from trainwright.strategies.contract.groups import new_subgroup

Mean = Callable[[Tensor], None]
"""Replaces a flat tensor by its mean over ranks that all call it with one of the same size."""
BUCKET_BYTES = 25 * 2**20


class WholeMean:
    """The mean by one all-reduce.

    Args:
        group: of the ranks; ``None``: all.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def __call__(self, flat: Tensor) -> None:
        dist.all_reduce(flat, group=self._group)
        flat /= dist.get_world_size(self._group)


class MeanInParts:
    """The mean by reduce-scatter and all-gather, perhaps with something in between.

    Args:
        group: of the ranks; ``None``: all.
        across: ranks of other nodes that sum up the same part; ``None``: there are no others.
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
        """The sum of this rank's part, the last ones of which are filled up with zeros."""
        missing = -flat.numel() % self._parts
        given = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
        if flat.device.type == "cpu":
            # gloo reduces everything everywhere in a reduce-scatter: this sends half of that.
            received = torch.empty_like(given)
            dist.all_to_all_single(received, given, group=self._group)
            rows: list[Tensor] = list(received.view(self._parts, -1))
            for row in rows[1:]:
                rows[0] += row
            return rows[0]
        own = given.new_empty(given.numel() // self._parts)
        reduce_scatter(own, given, group=self._group)
        return own


class MeansOfCopies:
    """The ways to the mean over the copies of a layout; process groups are made when they are first asked for.

    To ask is a collective of all ranks, which must ask for the same in the same order.

    Args:
        groups: ranks that hold copies of the same, list by list; all ranks are in one.
        copies: of a node, see ``copies_of_a_node``; less than 2 or
            all: there are no two levels.
    """

    def __init__(self, groups: Sequence[Sequence[int]], copies: int) -> None:
        self._groups = [list(ranks) for ranks in groups]
        self._copies = copies
        self._made: dict[str, dist.ProcessGroup | None] = {}

    @property
    def ways(self) -> tuple[str, ...]:
        """The names of those that there are."""
        has_levels = 1 < self._copies < len(self._groups[0])
        return (ALL_REDUCE, IN_PARTS, *([HIERARCHICAL] if has_levels else []))

    @property
    def names(self) -> dict[tuple[int, ...], str]:
        """What the groups of the two levels are called where bytes are counted, by their ranks."""
        if HIERARCHICAL not in self.ways:
            return {}
        within = {tuple(ranks): "replicate-within" for ranks in self._within}
        return {**within, **{tuple(ranks): "replicate-across" for ranks in self._across}}

    def by(self, way: str) -> Mean:
        """The mean by one of :attr:`ways`; a collective of all ranks."""
        if way == HIERARCHICAL:
            return MeanInParts(self._group("within", self._within), self._group("across", self._across))
        group = self._group("all", self._groups)
        return WholeMean(group) if way == ALL_REDUCE else MeanInParts(group)

    @property
    def _within(self) -> list[list[int]]:
        starts = range(0, len(self._groups[0]), self._copies)
        return [ranks[start : start + self._copies] for ranks in self._groups for start in starts]

    @property
    def _across(self) -> list[list[int]]:
        return [ranks[place :: self._copies] for ranks in self._groups for place in range(self._copies)]

    def _group(self, name: str, lists: list[list[int]]) -> dist.ProcessGroup | None:
        if name not in self._made:
            # One of its own even for all ranks: what goes on in a thread must not meet other collectives there.
            self._made[name] = new_subgroup(lists)
        return self._made[name]


class PartMeans:
    """Averages what a rank optimizes of parameters over those that hold copies, bucket by bucket.

    Args:
        mean: over them.
        device: from which is sent; parts may lie elsewhere (offloaded).
    """

    def __init__(self, mean: Mean, device: torch.device) -> None:
        self._mean, self._device = mean, device

    @torch.no_grad()
    def average(self, parts: Sequence[ReplicaPart]) -> None:
        """Replace the gradients of parts by their means; parts without one, on any rank, are left out. A collective."""
        for gradients in _buckets(parts):
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(self._device)
            self._mean(flat)
            for gradient, piece in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(piece.view(gradient.shape))


def _buckets(parts: Sequence[ReplicaPart]) -> Iterator[list[Tensor]]:
    """Gradients of one kin and dtype, at most :data:`BUCKET_BYTES` of them (one at least)."""
    open_buckets: dict[tuple[str, torch.dtype], list[Tensor]] = {}
    for part in parts:
        gradient = part.gradient
        if gradient is None or not gradient.numel():
            continue
        held = open_buckets.setdefault((part.kin, gradient.dtype), [])
        if held and sum(each.nbytes for each in held) + gradient.nbytes > BUCKET_BYTES:
            yield held
            held = open_buckets[part.kin, gradient.dtype] = []
        held.append(gradient)
    yield from open_buckets.values()


class MeanBesideBackward:
    """Averages the buckets of torch's ``DistributedDataParallel`` while backward makes others.

    On the CPU in a thread of its own, on CUDA in a stream of its own: one bucket after the other, in the order in which
    they are there, which is the same on all ranks.

    Args:
        mean: over the replicas, with process groups of its own.
        device: of the gradients.
    """

    def __init__(self, mean: Mean, device: torch.device) -> None:
        self._mean, self._device = mean, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = Background(device, "trainwright-mean") if self._stream is None else None

    def begin(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Average a flat tensor in place; the future is done when it is."""
        if self._thread is not None:
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            self._thread.submit(lambda: self._average(buffer, done))
            return done
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        done = torch.futures.Future(devices=[self._device])
        with torch.cuda.stream(self._stream):
            self._mean(buffer)
            done.set_result(buffer)  # remembers how far this stream has got, for whoever waits in another
        return done

    def close(self) -> None:
        """End the thread."""
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
