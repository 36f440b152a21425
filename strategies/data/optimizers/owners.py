"""Parameters stepped whole, each by one owner among the ranks that share them.

Before a step the owner receives the whole gradient, and the whole parameter if it lacks it; after the step every rank
receives its part of the parameter. Only the owner has optimizer state, whole. For ``P`` such elements on ``N`` ranks, a
rank sends ``P / N`` elements (less what it owns) in each of the two or three exchanges, and holds the state of at most
``P / N`` elements and one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from trainwright.checkpoint.exchange.distinct import all_gather_values, broadcast_value
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.read.run_state import map_tree
from trainwright.strategies.contract.collectives.bucketing import bucketed
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.state.run_state import OPTIMIZERS
from trainwright.strategies.state.shards import spread_like
from trainwright.strategies.state.wholes import shard_optimizer_state

# First and last index (exclusive) along each dim.
_Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Owned:
    """Ownership of one parameter.

    Args:
        shape: of the whole.
        owner: its index in the group.
        held: (rank, box of the whole) of every part.
        sources: the same, one rank per box.
        local: box of the whole -> its place in this rank's part.
    """

    shape: tuple[int, ...]
    owner: int
    held: Sequence[tuple[int, _Box]]
    sources: Sequence[tuple[int, _Box]]
    local: Mapping[_Box, _Box]


class Owners:
    """Assignment of whole parameters to the ranks that step them.

    Args:
        group: ranks that share the parameters.
        device: of communication.
        boxes: returns this rank's boxes of the whole, given a parameter's name and a tensor laid out like the
            optimizer's.
        bucket_bytes: size of a communication buffer; at least one parameter.
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
        """Return whether a parameter is stepped by an owner; the same on every rank of the group."""
        return name in self._owned

    def is_mine(self, name: str) -> bool:
        """Return whether this rank is the owner."""
        return self._owned[name].owner == self._rank

    def take(self, parameters: Mapping[str, Tensor]) -> None:
        """Assign owners, balanced by bytes, to the parameters that are not whole on every rank. A collective.

        Args:
            parameters: by name, as held by an optimizer; the same names in the same order on every rank.
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
        """Return the whole tensors of parameters that this rank owns. A collective.

        Args:
            parts: local parts by parameter name; the same names in the same order on every rank.
        """
        wholes = {
            name: torch.empty(self._owned[name].shape, dtype=part.dtype, device=part.device)
            for name, part in parts.items()
            if self.is_mine(name)
        }
        for names in self._buckets(parts):
            send, receive = self._no_views(), self._no_views()
            for name in names:
                owned, whole = self._owned[name], wholes.get(name)
                for rank, box in owned.sources:
                    if rank == self._rank:
                        send[owned.owner].append(_at(parts[name], owned.local[box]))
                    if whole is not None:
                        receive[rank].append(_at(whole, box))
            self._exchange(send, receive, parts[names[0]].dtype)
        return wholes

    @torch.no_grad()
    def give_back(self, parts: Mapping[str, Tensor], wholes: Mapping[str, Tensor]) -> None:
        """Scatter the owners' ``wholes`` into ``parts`` of every rank. A collective."""
        for names in self._buckets(parts):
            send, receive = self._no_views(), self._no_views()
            for name in names:
                owned = self._owned[name]
                for rank, box in owned.held:
                    if rank == self._rank:
                        receive[owned.owner].append(_at(parts[name], owned.local[box]))
                    if owned.owner == self._rank:
                        send[rank].append(_at(wholes[name], box))
            self._exchange(send, receive, parts[names[0]].dtype)

    def _no_views(self) -> list[list[Tensor]]:
        """Return lists of views for each rank, filled in the same order on both sides of an exchange."""
        return [[] for _ in range(self._size)]

    def _buckets(self, parts: Mapping[str, Tensor]) -> Iterator[list[str]]:
        """Return names that are exchanged together: of one dtype, up to the ranks' buffers."""
        return bucketed(
            parts,
            lambda name: parts[name].dtype,
            lambda name: _num_bytes(self._owned[name].shape, parts[name]),
            self._bucket_bytes * self._size,
        )

    @torch.no_grad()
    def _exchange(self, send: list[list[Tensor]], receive: list[list[Tensor]], dtype: torch.dtype) -> None:
        for given, taken in zip(send.pop(self._rank), receive.pop(self._rank), strict=True):
            if given.data_ptr() != taken.data_ptr():
                taken.copy_(given)
        counts = [[sum(view.numel() for view in views) for views in side] for side in (send, receive)]
        sent, received = (torch.empty(sum(count), dtype=dtype, device=self._device) for count in counts)
        _copy_through(sent, send, is_packing=True)
        for count in counts:
            count.insert(self._rank, 0)
        dist.all_to_all_single(received, sent, counts[1], counts[0], group=self._group)
        _copy_through(received, receive, is_packing=False)

    # ---- states ---------------------------------------------------------------------------------------------------

    def united(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        """Merge entries by name of all ranks that share parameters. A collective."""
        found = all_gather_values(dict(mine), self._group, self._device)
        return {name: value for entries in reversed(found) for name, value in entries.items()}

    def spread(self, name: str, values: Any) -> Any:
        """Return the owner's state of a parameter, whole and on the CPU, on every rank. A collective."""
        given = map_tree(values, Tensor, lambda tensor: tensor.detach().cpu()) if self.is_mine(name) else None
        return broadcast_value(given, self._owned[name].owner, self._group, self._device)


def _copy_through(buffer: Tensor, views: Sequence[Sequence[Tensor]], is_packing: bool) -> None:
    first = 0
    for view in (view for of_rank in views for view in of_rank):
        piece = buffer[first : first + view.numel()].view(view.shape)
        piece.copy_(view) if is_packing else view.copy_(piece)
        first += view.numel()


def _stencil(parameter: Tensor) -> Tensor:
    """Return a meta tensor distributed as a parameter is, with a contiguous part."""
    return spread_like(parameter, torch.empty(local_tensor(parameter).shape, dtype=parameter.dtype, device="meta"))


def _places(parts: TensorParts) -> tuple[tuple[int, ...], dict[_Box, _Box]]:
    """Return the shape of the whole, and box of the whole -> its place in the contiguous local part."""
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


def with_whole_states(
    checkpoint: dict[str, Any], optimizers: Sequence[Optimizer], name_of: Callable[[Tensor], str], owners: Owners | None
) -> dict[str, Any]:
    """Return a checkpoint completed by the optimizer states of other owners. A collective."""
    if owners is None or OPTIMIZERS not in checkpoint:
        return checkpoint
    states = []
    for optimizer, state in zip(optimizers, checkpoint[OPTIMIZERS], strict=True):
        names = dict(enumerate(name_of(p) for group in optimizer.param_groups for p in group["params"]))
        spread = {i: owners.spread(n, state["state"].get(i)) for i, n in names.items() if n in owners}
        found = {**state["state"], **{i: values for i, values in spread.items() if values is not None}}
        states.append({**state, "state": dict(sorted(found.items()))})
    return {**checkpoint, OPTIMIZERS: states}


def load_states(
    checkpoint: Mapping[str, Any],
    optimizers: Sequence[Optimizer],
    name_of: Callable[[Tensor], str],
    owners: Owners | None,
) -> None:
    """Load this rank's part of saved optimizer states, and the whole state of parameters it owns."""

    def is_mine(parameter: Tensor) -> bool | None:
        name = name_of(parameter)
        return None if owners is None or name not in owners else owners.is_mine(name)

    for optimizer, state in zip(optimizers, checkpoint[OPTIMIZERS], strict=True):
        optimizer.load_state_dict(shard_optimizer_state(optimizer, state, is_mine))
