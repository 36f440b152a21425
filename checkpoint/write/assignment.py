"""Assignment of boxes that several ranks hold to the ranks that write them."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from trainwright.checkpoint.exchange.distinct import any_of_ranks, broadcast_value, equal_ranks, gather_distinct
from trainwright.checkpoint.format.directory import OF_RANK
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.write.split import MetadataSplit, divide_metadata

# Replaces the rank in keys, so that ranks that differ by it alone form one group.
_OWN = "rank/*/"


class Box(NamedTuple):
    """A box of a tensor, without its values.

    Args:
        key: of the tensor.
        offsets: of the box in the whole.
        sizes: of the box.
        num_bytes: of its elements.
        shape: of the whole.
        dtype: of the whole, such as ``float32``.
    """

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    num_bytes: int
    shape: tuple[int, ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True)
class ReplicaGroup:
    """Ranks that hold the same boxes, such as one shard in all replicas.

    Args:
        ranks: in order.
        boxes: of each of them; keys of rank-local tensors begin with ``rank/*/``.
    """

    ranks: Sequence[int]
    boxes: Sequence[Box]


@dataclass(frozen=True)
class Assignment:
    """Assignment of boxes to writing ranks.

    Args:
        own: positions of the boxes that this rank writes, among all that it holds.
        groups: all groups; on the first rank only.
        winners: index of the group that writes a box that several groups hold.
        split: division of metadata among ranks; ``None``: the first rank writes all of it.
        led: by index, the groups whose boxes this rank lists, if metadata is divided.
        common: writing rank of each box that several groups hold, of those that one of ``led`` holds.
        composed: metadata files of this rank by name, built once, since they are the same at every save.
    """

    own: frozenset[int]
    groups: Sequence[ReplicaGroup]
    winners: Mapping[Box, int]
    split: MetadataSplit | None = None
    led: Mapping[int, ReplicaGroup] = field(default_factory=dict)
    common: Mapping[Box, int] = field(default_factory=dict)
    composed: dict[str, bytes] = field(default_factory=dict, compare=False)

    def written(self) -> Iterator[tuple[Box, int]]:
        """Yield each box of the checkpoint and the rank that writes it. On the first rank only."""
        for number, replicas in enumerate(self.groups):
            for name, box in own_boxes(replicas):
                yield from ((box._replace(key=f"{OF_RANK}{rank}/{name}"), rank) for rank in replicas.ranks)
            yield from self.written_by(number, replicas)

    def written_by(self, number: int, replicas: ReplicaGroup) -> Iterator[tuple[Box, int]]:
        """Yield each box that a group writes and the rank that writes it; without rank-local tensors."""
        writers = share_out(replicas.boxes, len(replicas.ranks), number, self.winners)
        yield from ((replicas.boxes[position], replicas.ranks[writer]) for position, writer in writers.items())


def own_boxes(replicas: ReplicaGroup) -> Iterator[tuple[str, Box]]:
    """Yield the rank-local boxes of a group, with their names after the rank."""
    return ((box.key.removeprefix(_OWN), box) for box in replicas.boxes if is_own(box))


def is_own(box: Box) -> bool:
    """Return whether a box is rank-local, so that no other rank could write it."""
    return box.key.startswith(_OWN)


class WriteAssigner:
    """Selects the boxes that each rank writes, so that no rank copies what another one writes.

    With replicated state each rank copies only a part. Sharding seldom changes during a run, so the assignment is kept,
    and ranks confirm with one number that it still holds. Ranks that hold the same boxes send them once, so traffic
    grows with what differs, not with the number of ranks.

    Args:
        group: a gloo group of all ranks; ``None``: this process alone, which writes everything.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.last: Assignment | None = None
        """The current assignment; ``None`` before the first."""
        self._boxes: list[Box] | None = None

    def assign(self, tensors: Mapping[str, TensorParts]) -> dict[str, TensorParts]:
        """Return the boxes of ``tensors`` that this rank writes. A collective."""
        rank = 0 if self.group is None else dist.get_rank(self.group)
        boxes = boxes_of(tensors, rank)
        if any_of_ranks(boxes != self._boxes, self.group):
            self.last = agree(boxes, self.group)
            self._boxes = boxes
        assert self.last is not None
        return _keep(tensors, self.last.own)


def agree(boxes: list[Box], group: dist.ProcessGroup | None) -> Assignment:
    """Compute the assignment. A collective.

    Args:
        boxes: of this rank, in order, see :func:`boxes_of`.
        group: a gloo group of all ranks; ``None``: this process alone.
    """
    if group is None:
        return Assignment(frozenset(range(len(boxes))), [ReplicaGroup([0], boxes)], {})
    own = json.dumps(boxes, separators=(",", ":")).encode()
    equal = equal_ranks(own, group)
    of_rank, rank = equal.of_rank, dist.get_rank(group)
    members: list[list[int]] = [[] for _ in equal.firsts]
    for each, number in enumerate(of_rank):
        members[number].append(each)
    groups = list(_groups_of(gather_distinct(own, equal, group), members).values())
    split = divide_metadata(equal)
    led = {} if split is None else _groups_of(gather_distinct(own, equal, group, split.groups), members)
    winners = dict(broadcast_value(list(choose_writers(groups).items()) if groups else None, 0, group))
    mine = of_rank[rank]
    place = members[mine].index(rank)
    writers = share_out(boxes, len(members[mine]), mine, winners)
    of_rank_alone = {position for position, box in enumerate(boxes) if is_own(box)}
    kept = frozenset(of_rank_alone | {p for p, writer in writers.items() if writer == place})
    common = writers_of_common(winners, members) if led else {}
    held = {box for replicas in led.values() for box in replicas.boxes if box in common}
    return Assignment(kept, groups, winners, split, led, {box: writer for box, writer in common.items() if box in held})


def _groups_of(packed: Mapping[int, bytes], members: Sequence[Sequence[int]]) -> dict[int, ReplicaGroup]:
    return {number: ReplicaGroup(members[number], _boxes(json.loads(text))) for number, text in packed.items()}


def _boxes(plain: list[list[Any]]) -> list[Box]:
    return [
        Box(key, tuple(offsets), tuple(sizes), num_bytes, tuple(shape), dtype)
        for key, offsets, sizes, num_bytes, shape, dtype in plain
    ]


def boxes_of(tensors: Mapping[str, TensorParts], rank: int = 0) -> list[Box]:
    """Return the boxes of a rank, in order.

    Args:
        tensors: held by the rank.
        rank: its number, replaced in the keys of rank-local tensors.
    """
    mine = f"{OF_RANK}{rank}/"
    return [
        Box(
            _OWN + key.removeprefix(mine) if key.startswith(mine) else key,
            tuple(offsets),
            tuple(box.shape),
            box.numel() * box.element_size(),
            parts.shape,
            str(parts.dtype).removeprefix("torch."),
        )
        for key, parts in tensors.items()
        for offsets, box in parts.parts
    ]


def choose_writers(groups: Sequence[ReplicaGroup]) -> dict[Box, int]:
    """Return the index of the group that writes each box that several groups hold, balancing bytes per rank.

    Greedy: the largest boxes first, each to the holder with the least load per rank. Boxes with one holder count first.
    """
    holders: dict[Box, list[int]] = {}
    for number, replicas in enumerate(groups):
        for box in replicas.boxes:
            if not is_own(box):
                holders.setdefault(box, []).append(number)
    load = [0.0] * len(groups)
    for number, replicas in enumerate(groups):
        alone = sum(box.num_bytes for box in replicas.boxes if len(holders.get(box, ())) == 1)
        own = sum(box.num_bytes for box in replicas.boxes if is_own(box))
        load[number] = own + alone / len(replicas.ranks)
    winners = {}
    shared = [box for box, numbers in holders.items() if len(numbers) > 1]
    for box in sorted(shared, key=lambda box: (-box.num_bytes, box)):
        number = min(holders[box], key=lambda number: (load[number], number))
        winners[box] = number
        load[number] += box.num_bytes / len(groups[number].ranks)
    return winners


def share_out(
    boxes: Sequence[Box], ranks: int, number: int = 0, winners: Mapping[Box, int] | None = None
) -> dict[int, int]:
    """Assign each box to one of the ranks of a group, balancing bytes.

    Greedy: the largest boxes first, each to the rank with the least load; boxes that other groups hold too come first
    of all, so that :func:`writers_of_common` gets the same result without knowing the others.

    Args:
        boxes: of the group.
        ranks: number of its ranks.
        number: index of the group.
        winners: index of the group that writes a box that several groups hold.

    Returns:
        Position of a box -> index of the writing rank; without rank-local boxes and those that other groups write.
    """
    winners = winners or {}
    dealt = [p for p, box in enumerate(boxes) if not is_own(box) and winners.get(box, number) == number]
    load = [(0, rank) for rank in range(ranks)]
    shares = {}
    for position in sorted(dealt, key=lambda p: (boxes[p] not in winners, -boxes[p].num_bytes, boxes[p])):
        least, rank = load[0]
        shares[position] = rank
        heapq.heapreplace(load, (least + boxes[position].num_bytes, rank))
    return shares


def writers_of_common(winners: Mapping[Box, int], members: Sequence[Sequence[int]]) -> dict[Box, int]:
    """Return the rank that writes each box that several groups hold.

    Args:
        winners: index of the group that writes it.
        members: ranks of each group.
    """
    won: dict[int, list[Box]] = {}
    for box, number in winners.items():
        won.setdefault(number, []).append(box)
    writers = {}
    for number, boxes in won.items():
        shares = share_out(boxes, len(members[number]), number, winners)
        writers.update({boxes[position]: members[number][writer] for position, writer in shares.items()})
    return writers


def _keep(tensors: Mapping[str, TensorParts], positions: frozenset[int]) -> dict[str, TensorParts]:
    kept, position = {}, 0
    for key, parts in tensors.items():
        own = []
        for part in parts.parts:
            if position in positions:
                own.append(part)
            position += 1
        if own:  # a whole may be of a lazy subclass: imports are not in memory yet
            is_whole = len(own) == len(parts.parts)
            kept[key] = parts if is_whole else TensorParts(parts.shape, parts.dtype, own)
    return kept
