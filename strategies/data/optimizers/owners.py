"""Parameters that are stepped whole, each by one rank of those that share it, and the way there and back.

Before a step the owner gets the whole gradient, and the whole parameter where it has not got it; after the step every
rank gets its part of the parameter back. Only the owner has optimizer state, and has it whole. Of ``P`` parameters
that are stepped so and ``N`` ranks that share them, a rank sends ``P / N`` elements (less what it owns) for each of
the two or three exchanges, and holds the state of at most ``P / N`` elements and one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.checkpoint.exchange.distinct import all_gather_values, broadcast_value
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.strategies.contract.gradients import local_tensor

# First and last index (exclusive) along each dim.
_Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Owned:
    """One parameter.

    Args:
        shape: of the whole.
        owner: index of its owner in the group.
        held: boxes of the whole, and the index of each rank that holds one.
        sources: the same, of each box one rank.
        local: where in this rank's part a box lies.
    """

    shape: tuple[int, ...]
    owner: int
    held: Sequence[tuple[int, _Box]]
    sources: Sequence[tuple[int, _Box]]
    local: Mapping[_Box, _Box]


@dataclass
class _Parcel:
    """Views that are sent to and received from each rank, in the same order on both sides."""

    send: list[list[Tensor]] = field(default_factory=list)
    receive: list[list[Tensor]] = field(default_factory=list)


class Owners:
    """Which rank steps which parameters whole.

    Args:
        group: ranks that share the parameters.
        device: that the group communicates from.
        boxes: from a parameter's name and a tensor laid out like what an optimizer holds of it to the boxes of the
            whole that this rank holds.
        bucket_bytes: of a buffer in which parts travel, one parameter at least.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        boxes: Callable[[str, Tensor], TensorParts],
        bucket_bytes: int,
    ) -> None:
        self._group = group
        self._device = device
        self._boxes = boxes
        self._bucket_bytes = bucket_bytes
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._loads = [0] * self._size
        self._owned: dict[str, _Owned] = {}

    def __contains__(self, name: str) -> bool:
        """Whether a parameter is stepped by its owner; the same on every rank of the group."""
        return name in self._owned

    def is_mine(self, name: str) -> bool:
        """Whether this rank is the owner."""
        return self._owned[name].owner == self._rank

    def take(self, parameters: Mapping[str, Tensor]) -> None:
        """Find owners, balanced by bytes, of those of the parameters that no rank has whole. A collective.

        Args:
            parameters: by name, as an optimizer holds them; the same names in the same order on every rank.
        """
        mine = {name: _places(self._boxes(name, _stencil(each))) for name, each in parameters.items()}
        found = all_gather_values(
            {n: (tuple(shape), list(at)) for n, (shape, at) in mine.items()}, self._group, self._device
        )
        wholes = {name: tuple((0, length) for length in shape) for name, (shape, _) in mine.items()}
        split = [name for name in mine if any(boxes[name][1] != [wholes[name]] for boxes in found)]
        for name in sorted(split, key=lambda name: -_num_bytes(mine[name][0], parameters[name])):
            held = [(rank, box) for rank, boxes in enumerate(found) for box in boxes[name][1]]
            owner = min(range(self._size), key=lambda rank: (self._loads[rank], rank))
            self._loads[owner] += _num_bytes(mine[name][0], parameters[name])
            sources = {box: rank for rank, box in reversed(held)} | {box: owner for rank, box in held if rank == owner}
            self._owned[name] = _Owned(
                mine[name][0], owner, held, [(rank, box) for box, rank in sources.items()], mine[name][1]
            )

    # ---- exchanges ------------------------------------------------------------------------------------------------

    def fetch(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The wholes of what this rank owns. A collective.

        Args:
            parts: what each rank holds, by the names of the parameters; the same names in the same order everywhere.
        """
        wholes = {
            name: torch.empty(self._owned[name].shape, dtype=part.dtype, device=part.device)
            for name, part in parts.items()
            if self.is_mine(name)
        }
        for names in self._buckets(parts):
            parcel = self._parcel()
            for name in names:
                self._collect(name, self._owned[name], parts[name], wholes.get(name), parcel)
            self._exchange(parcel, parts[names[0]].dtype)
        return wholes

    def _collect(self, name: str, owned: _Owned, part: Tensor, whole: Tensor | None, parcel: _Parcel) -> None:
        for rank, box in owned.sources:
            if rank == self._rank:
                parcel.send[owned.owner].append(_at(part, owned.local[box]))
            if whole is not None:
                parcel.receive[rank].append(_at(whole, box))

    @torch.no_grad()
    def give_back(self, parts: Mapping[str, Tensor], wholes: Mapping[str, Tensor]) -> None:
        """Write parts of the wholes, which their owners give, into ``parts`` of every rank. A collective."""
        for names in self._buckets(parts):
            parcel = self._parcel()
            for name in names:
                owned = self._owned[name]
                for rank, box in owned.held:
                    if rank == self._rank:
                        parcel.receive[owned.owner].append(_at(parts[name], owned.local[box]))
                    if owned.owner == self._rank:
                        parcel.send[rank].append(_at(wholes[name], box))
            self._exchange(parcel, parts[names[0]].dtype)

    def _parcel(self) -> _Parcel:
        return _Parcel([[] for _ in range(self._size)], [[] for _ in range(self._size)])

    def _buckets(self, parts: Mapping[str, Tensor]) -> Iterator[list[str]]:
        """Names that travel together: of one dtype, as much as fills the buffers of the ranks."""
        names: list[str] = []
        size = 0
        for name, part in parts.items():
            nbytes = _num_bytes(self._owned[name].shape, part)
            if names and (size + nbytes > self._bucket_bytes * self._size or part.dtype != parts[names[0]].dtype):
                yield names
                names, size = [], 0
            names.append(name)
            size += nbytes
        if names:
            yield names

    @torch.no_grad()
    def _exchange(self, parcel: _Parcel, dtype: torch.dtype) -> None:
        for given, taken in zip(parcel.send.pop(self._rank), parcel.receive.pop(self._rank), strict=True):
            if given.data_ptr() != taken.data_ptr():
                taken.copy_(given)
        counts = [[sum(view.numel() for view in views) for views in side] for side in (parcel.send, parcel.receive)]
        sent, received = (torch.empty(sum(count), dtype=dtype, device=self._device) for count in counts)
        _copy_through(sent, parcel.send, is_packing=True)
        for count in counts:
            count.insert(self._rank, 0)
        dist.all_to_all_single(received, sent, counts[1], counts[0], group=self._group)
        _copy_through(received, parcel.receive, is_packing=False)

    # ---- states ---------------------------------------------------------------------------------------------------

    def united(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        """Entries by name of all ranks that share parameters. A collective."""
        found = all_gather_values(dict(mine), self._group, self._device)
        return {name: value for entries in reversed(found) for name, value in entries.items()}

    def spread(self, name: str, values: Any) -> Any:
        """The state that its owner has of a parameter, whole and on the CPU of every rank. A collective."""
        given = _on_cpu(values) if self.is_mine(name) else None
        return broadcast_value(given, self._owned[name].owner, self._group, self._device)


def _copy_through(buffer: Tensor, views: Sequence[Sequence[Tensor]], is_packing: bool) -> None:
    first = 0
    for view in (view for of_rank in views for view in of_rank):
        piece = buffer[first : first + view.numel()].view(view.shape)
        piece.copy_(view) if is_packing else view.copy_(piece)
        first += view.numel()


def _stencil(parameter: Tensor) -> Tensor:
    """A tensor that is spread as a parameter is, whose part is contiguous and takes no memory."""
    from trainwright.strategies.state.shards import spread_like

    return spread_like(parameter, torch.empty(local_tensor(parameter).shape, dtype=parameter.dtype, device="meta"))


def _places(parts: TensorParts) -> tuple[tuple[int, ...], dict[_Box, _Box]]:
    """Shape of the whole; box of the whole -> where it lies in the (contiguous) part that it is a view of."""
    places = {}
    for offsets, view in parts.parts:
        rest, first = view.storage_offset(), []
        for stride in view.stride():
            first.append(rest // max(stride, 1))
            rest %= max(stride, 1)
        places[_box(offsets, view.shape)] = _box(first, view.shape)
    return parts.shape, places


def _box(first: Sequence[int], lengths: Sequence[int]) -> _Box:
    return tuple((start, start + length) for start, length in zip(first, lengths, strict=True))


def _at(tensor: Tensor, box: _Box) -> Tensor:
    return tensor[tuple(slice(first, last) for first, last in box)]


def _num_bytes(shape: Sequence[int], like: Tensor) -> int:
    return torch.Size(shape).numel() * like.element_size()


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(each) for key, each in value.items()}
    return [_on_cpu(each) for each in value] if isinstance(value, list) else value
