"""Which rank writes what several hold, settled before anything is copied."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from trainwright.checkpoint.exchange.distinct import any_of_ranks, from_rank, kin_of, to_first
from trainwright.checkpoint.format.directory import OF_RANK
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.write.split import ListSplit, split_of

# In the place of the number where ranks are compared: those that differ by it alone are dealt to as one.
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
class WriterKin:
    """Ranks that hold the same, such as those that hold one shard in all replicas.

    Args:
        ranks: in order.
        boxes: that each of them holds; with ``rank/*/`` before what is a rank's own.
    """

    ranks: Sequence[int]
    boxes: Sequence[Box]


@dataclass(frozen=True)
class Deal:
    """Who writes what.

    Args:
        own: positions of the boxes that this rank writes, among all that it holds.
        kins: all ranks, those that hold the same together; on the first rank alone.
        winners: which kin writes a box that several hold, by its number.
        split: how what is said of files and boxes is divided among the ranks; ``None``: the first rank says it all.
        led: by number, the kin whose boxes this rank writes down, where that is divided.
        common: the rank that writes a box that several kin hold, of those that one of ``led`` holds.
        composed: by name, the files that this rank makes of the deal; the same at every save, so made once.
    """

    own: frozenset[int]
    kins: Sequence[WriterKin]
    winners: Mapping[Box, int]
    split: ListSplit | None = None
    led: Mapping[int, WriterKin] = field(default_factory=dict)
    common: Mapping[Box, int] = field(default_factory=dict)
    composed: dict[str, bytes] = field(default_factory=dict, compare=False)

    def written(self) -> Iterator[tuple[Box, int]]:
        """Each box of the checkpoint and the rank that writes it. On the first rank alone."""
        for number, kin in enumerate(self.kins):
            for name, box in own_boxes(kin):
                yield from ((box._replace(key=f"{OF_RANK}{rank}/{name}"), rank) for rank in kin.ranks)
            yield from self.written_by(number, kin)

    def written_by(self, number: int, kin: WriterKin) -> Iterator[tuple[Box, int]]:
        """Each box that these kin write, and the rank of them that does; without what is a rank's own."""
        writers = share_out(kin.boxes, len(kin.ranks), number, self.winners)
        yield from ((kin.boxes[position], kin.ranks[writer]) for position, writer in writers.items())


def own_boxes(kin: WriterKin) -> Iterator[tuple[str, Box]]:
    """What each rank of these kin has of its own, with the name that follows its number."""
    return ((box.key.removeprefix(_OWN), box) for box in kin.boxes if is_own(box))


def is_own(box: Box) -> bool:
    """Whether a box is what each of its ranks has of its own, which no other could write."""
    return box.key.startswith(_OWN)


class Dealer:
    """Leaves each rank those of its boxes that it shall write, so that nobody copies what another one writes.

    Where all ranks hold the same (data parallel training), each then copies a part only. Who holds what seldom changes
    during a run, so the deal is kept, and the ranks agree by one number that it still holds. When it is made, ranks
    that hold the same speak through the first of them: what is sent grows with what differs, not with the ranks.

    Args:
        group: a gloo group of all ranks; ``None``: this process alone, which keeps everything.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.last: Deal | None = None
        """The deal that holds; ``None`` before the first."""
        self._boxes: list[Box] | None = None

    def deal(self, tensors: Mapping[str, TensorParts]) -> dict[str, TensorParts]:
        """The boxes of ``tensors`` that this rank shall write. A collective."""
        rank = 0 if self.group is None else dist.get_rank(self.group)
        boxes = boxes_of(tensors, rank)
        if any_of_ranks(boxes != self._boxes, self.group):
            self.last = agree(boxes, self.group)
            self._boxes = boxes
        assert self.last is not None
        return _keep(tensors, self.last.own)


def agree(boxes: list[Box], group: dist.ProcessGroup | None) -> Deal:
    """Settle who writes what. A collective.

    Args:
        boxes: of this rank, in order, see :func:`boxes_of`.
        group: a gloo group of all ranks; ``None``: this process alone.
    """
    if group is None:
        return Deal(frozenset(range(len(boxes))), [WriterKin([0], boxes)], {})
    own = json.dumps(boxes, separators=(",", ":")).encode()
    kin = kin_of(own, group)
    of_rank, rank = kin.of_rank, dist.get_rank(group)
    members: list[list[int]] = [[] for _ in kin.firsts]
    for each, number in enumerate(of_rank):
        members[number].append(each)
    kins = list(_kins_of(to_first(own, kin, group), members).values())
    split = split_of(kin)
    led = {} if split is None else _kins_of(to_first(own, kin, group, split.kins), members)
    winners = dict(from_rank(list(choose_writers(kins).items()) if kins else None, 0, group))
    mine = of_rank[rank]
    place = members[mine].index(rank)
    writers = share_out(boxes, len(members[mine]), mine, winners)
    of_rank_alone = {position for position, box in enumerate(boxes) if is_own(box)}
    kept = frozenset(of_rank_alone | {p for p, writer in writers.items() if writer == place})
    common = writers_of_common(winners, members) if led else {}
    held = {box for kin in led.values() for box in kin.boxes if box in common}
    return Deal(kept, kins, winners, split, led, {box: writer for box, writer in common.items() if box in held})


def _kins_of(said: Mapping[int, bytes], members: Sequence[Sequence[int]]) -> dict[int, WriterKin]:
    return {number: WriterKin(members[number], _boxes(json.loads(text))) for number, text in said.items()}


def _boxes(plain: list[list[Any]]) -> list[Box]:
    return [
        Box(key, tuple(offsets), tuple(sizes), num_bytes, tuple(shape), dtype)
        for key, offsets, sizes, num_bytes, shape, dtype in plain
    ]


def boxes_of(tensors: Mapping[str, TensorParts], rank: int = 0) -> list[Box]:
    """The boxes of a rank, in order.

    Args:
        tensors: what it holds.
        rank: its number, which is left out of the keys of what is its own.
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


def choose_writers(kins: Sequence[WriterKin]) -> dict[Box, int]:
    """Which kin writes a box that several hold, by its number, so that ranks write about as many bytes.

    The largest boxes are given first, each to the holder whose ranks have least so far. What only one holds leaves
    nothing to choose; it counts before the others are dealt.
    """
    holders: dict[Box, list[int]] = {}
    for number, kin in enumerate(kins):
        for box in kin.boxes:
            if not is_own(box):
                holders.setdefault(box, []).append(number)
    load = [0.0] * len(kins)
    for number, kin in enumerate(kins):
        alone = sum(box.num_bytes for box in kin.boxes if len(holders.get(box, ())) == 1)
        own = sum(box.num_bytes for box in kin.boxes if is_own(box))
        load[number] = own + alone / len(kin.ranks)
    winners = {}
    shared = [box for box, numbers in holders.items() if len(numbers) > 1]
    for box in sorted(shared, key=lambda box: (-box.num_bytes, box)):
        number = min(holders[box], key=lambda number: (load[number], number))
        winners[box] = number
        load[number] += box.num_bytes / len(kins[number].ranks)
    return winners


def share_out(
    boxes: Sequence[Box], ranks: int, number: int = 0, winners: Mapping[Box, int] | None = None
) -> dict[int, int]:
    """Give each box to one of the ranks that hold the same, so that they write about as many bytes.

    The largest boxes are given first, each to the rank that has least so far; before them, those that other kin hold
    too, so that these are where :func:`writers_of_common` says, who does not know the others.

    Args:
        boxes: that each of them holds.
        ranks: how many they are.
        number: of these kin.
        winners: which kin writes a box that several hold.

    Returns:
        Position of a box -> which of the ranks writes it; without what is a rank's own, or written by other kin.
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
    """The rank that writes each box that several kin hold.

    Args:
        winners: which kin does, by its number.
        members: of each kin, by its number, the ranks.
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
        if own:  # what is kept whole may know how to be read: an import is not in memory yet
            is_whole = len(own) == len(parts.parts)
            kept[key] = parts if is_whole else TensorParts(parts.shape, parts.dtype, own)
    return kept
