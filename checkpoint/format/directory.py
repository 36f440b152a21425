"""Which tensors a checkpoint of many ranks holds, and which of its files of boxes tells where a box of one is.

Each such file has the boxes of ranks that follow each other, so of one tensor mostly a row of neighbours. The directory
says from where to where that is. Tensors of one shape are mostly cut alike, so what is said of one holds for the others
and is written once; and ranks mostly have the same of their own. So the directory grows with the tensors, not with
their boxes. Neither torch nor Lightning is needed here.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from trainwright.core.text.bounded import natural, naturals, parse_json, shape_of

OF_RANK = "rank/"
"""Prefix of the keys of what a rank has of its own, before its number: ``rank/3/...``."""
Box = tuple[tuple[int, ...], tuple[int, ...], int]
"""Offsets, sizes, and the rank that wrote it."""
_DIGITS = 10  # of a rank


class BoxPlace(NamedTuple):
    """A file of boxes that has some of a tensor.

    Args:
        file: its number.
        begin: in each tensor dimension, where the first of its boxes begins.
        end: where the last of them ends.
    """

    file: int
    begin: tuple[int, ...]
    end: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """What the directory says of one tensor.

    Args:
        dtype: torch's name without ``torch.``.
        shape: of the whole.
        places: files that have boxes of it; none where one rank has it of its own.
    """

    dtype: str
    shape: tuple[int, ...]
    places: tuple[BoxPlace, ...] = ()


@dataclass
class Directory:
    """The tensors of a checkpoint.

    Args:
        tensors: what is said of each, by key; without what ranks have of their own.
        kinds: sets of what ranks have of their own, by the name that follows the rank's number.
        own: in the order of the ranks, how many that follow each other have which of ``kinds``.
    """

    tensors: dict[str, Entry]
    kinds: Sequence[Mapping[str, Entry]] = ()
    own: Sequence[tuple[int, int]] = ()
    _ends: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._ends = list(accumulate(count for count, _ in self.own))

    @property
    def num_ranks(self) -> int:
        """How many ranks wrote it."""
        return self._ends[-1] if self._ends else 0

    def own_of(self, rank: int) -> Mapping[str, Entry]:
        """What a rank has of its own, by name."""
        if not 0 <= rank < self.num_ranks:
            return {}
        return self.kinds[self.own[bisect_right(self._ends, rank)][1]]

    def find(self, key: str) -> Entry | None:
        """What is said of a tensor; ``None``: there is none of that name."""
        rank, name = rank_and_name(key)
        return self.tensors.get(key) if rank is None else self.own_of(rank).get(name)

    def keys(self) -> Collection[str]:
        """Names of all tensors; looking for one does not go through them."""
        return _Keys(self)

    def keys_under(self, prefix: str) -> list[str]:
        """Names that begin with ``prefix``; of one rank's own, no other rank's are looked at."""
        rank, name = rank_and_name(prefix)
        if rank is not None:
            return [f"{OF_RANK}{rank}/{own}" for own in self.own_of(rank) if own.startswith(name)]
        all_keys = self.keys() if OF_RANK.startswith(prefix) or prefix.startswith(OF_RANK) else self.tensors
        return [key for key in all_keys if key.startswith(prefix)]

    def to_bytes(self) -> bytes:
        """As it is written, ``tensors.json``: what many tensors have in common once."""
        patterns: dict[tuple[BoxPlace, ...], int] = {}
        tensors = {
            key: [entry.dtype, entry.shape, patterns.setdefault(entry.places, len(patterns))]
            for key, entry in sorted(self.tensors.items())
        }
        kinds = [[[name, entry.dtype, entry.shape] for name, entry in kind.items()] for kind in self.kinds]
        plain = {"tensors": tensors, "patterns": list(patterns), "kinds": kinds, "own": self.own}
        return json.dumps(plain, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, most_ranks: int) -> Directory:
        """What :meth:`to_bytes` wrote.

        Args:
            data: of it.
            most_ranks: that may have something of their own, such as the files of the checkpoint.

        Raises:
            ValueError, LookupError, TypeError, AttributeError: if it is no such thing.
        """
        plain = parse_json(data)
        patterns = [tuple(_place(*each) for each in pattern) for pattern in plain["patterns"]]
        tensors = {
            key: Entry(str(dtype), shape_of(shape), patterns[natural(pattern)])
            for key, (dtype, shape, pattern) in plain["tensors"].items()
        }
        kinds = [
            {str(name): Entry(str(dtype), shape_of(shape)) for name, dtype, shape in kind} for kind in plain["kinds"]
        ]
        own = [(natural(count), natural(kind)) for count, kind in plain["own"]]
        if sum(count for count, _ in own) > most_ranks:
            raise ValueError("it says of more ranks what they have than there are files")
        if any(kind >= len(kinds) for _, kind in own) or any(key.startswith(OF_RANK) for key in tensors):
            raise ValueError("it says of ranks what it does not hold")
        if any(not len(e.shape) == len(p.begin) == len(p.end) for e in tensors.values() for p in e.places):
            raise ValueError("it says of a tensor that it lies in a box of other dims")
        return cls(tensors, kinds, own)


class _Keys(Collection[str]):
    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._directory.find(key) is not None

    def __iter__(self) -> Iterator[str]:
        yield from self._directory.tensors
        for rank in range(self._directory.num_ranks):
            yield from (f"{OF_RANK}{rank}/{name}" for name in self._directory.own_of(rank))

    def __len__(self) -> int:
        own = (count * len(self._directory.kinds[kind]) for count, kind in self._directory.own)
        return len(self._directory.tensors) + sum(own)


def rank_and_name(key: str) -> tuple[int | None, str]:
    """The rank whose own a tensor is, and its name there; ``None``: it is no rank's own."""
    number, slash, name = key.removeprefix(OF_RANK).partition("/")
    if not key.startswith(OF_RANK) or not slash or not (number.isdecimal() and len(number) < _DIGITS):
        return None, key
    return int(number), name


def overlap(begin: Sequence[int], end: Sequence[int], other_begin: Sequence[int], other_end: Sequence[int]) -> int:
    """Elements that two boxes of one tensor have in common; a box without dimensions is one element."""
    count = 1
    for first, last, other_first, other_last in zip(begin, end, other_begin, other_end, strict=True):
        count *= max(0, min(last, other_last) - max(first, other_first))
    return count


def in_runs(kinds: Iterable[int]) -> list[tuple[int, int]]:
    """How many that follow each other are of which kind, from the kind of each."""
    runs: list[tuple[int, int]] = []
    for kind in kinds:
        if runs and runs[-1][1] == kind:
            runs[-1] = (runs[-1][0] + 1, kind)
        else:
            runs.append((1, kind))
    return runs


def boxes_from_json(data: bytes) -> dict[str, list[Box]]:
    """The boxes that one file tells of, by key.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: if it is no such file.
    """
    return {
        key: [(naturals(offsets), naturals(sizes), natural(rank)) for offsets, sizes, rank in boxes]
        for key, boxes in parse_json(data)["tensors"].items()
    }


def _place(file: Any, begin: Any, end: Any) -> BoxPlace:
    return BoxPlace(natural(file), naturals(begin), naturals(end))
