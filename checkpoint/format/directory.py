"""Directory of the tensors of a many-rank checkpoint: which box file locates which part of a tensor.

Each box file has the boxes of consecutive ranks, so mostly a contiguous region of each tensor; the directory stores the
bounds of these regions. Tensors of one shape are mostly sharded alike and share one pattern, and most ranks share one
set of rank-local tensors. So the directory grows with the number of tensors, not of boxes. Imports neither torch nor
Lightning.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from trainwright.checkpoint.format.boxes import Extent, StoredBox, extent_of
from trainwright.checkpoint.format.records import file_of
from trainwright.core.text.bounded import natural, naturals, parse_json, shape_of

OF_RANK = "rank/"
"""Prefix of the keys of rank-local tensors, before the rank: ``rank/3/...``."""
Box = tuple[tuple[int, ...], tuple[int, ...], int]
"""Offsets, sizes, and the rank that wrote it."""
_DIGITS = 10  # of a rank number


class BoxPlace(NamedTuple):
    """A box file with boxes of a tensor.

    Args:
        file: its number.
        begin: lower bounds of its boxes in each tensor dim.
        end: upper bounds of its boxes.
    """

    file: int
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def extent(self) -> Extent:
        """Offsets and sizes of the bounds."""
        return self.begin, tuple(last - first for first, last in zip(self.begin, self.end, strict=True))


@dataclass(frozen=True)
class Entry:
    """A tensor of the directory.

    Args:
        dtype: torch's name without ``torch.``.
        shape: of the whole tensor.
        places: box files that locate it; none for rank-local tensors.
    """

    dtype: str
    shape: tuple[int, ...]
    places: tuple[BoxPlace, ...] = ()


@dataclass
class Directory(Collection[str]):
    """The tensors of a checkpoint; a collection of their names.

    Args:
        tensors: entries by key, without rank-local tensors.
        kinds: sets of rank-local tensors, by the name after the rank.
        own: run-length encoding over ranks of which of ``kinds`` each has: pairs of count and index.
    """

    tensors: dict[str, Entry]
    kinds: Sequence[Mapping[str, Entry]] = ()
    own: Sequence[tuple[int, int]] = ()
    _ends: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._ends = list(accumulate(count for count, _ in self.own))

    @property
    def num_ranks(self) -> int:
        """Number of ranks that wrote the checkpoint."""
        return self._ends[-1] if self._ends else 0

    def own_of(self, rank: int) -> Mapping[str, Entry]:
        """Return the rank-local tensors of a rank, by name."""
        if not 0 <= rank < self.num_ranks:
            return {}
        return self.kinds[self.own[bisect_right(self._ends, rank)][1]]

    def find(self, key: str) -> Entry | None:
        """Return the entry of a tensor; ``None`` if there is no such tensor."""
        rank, name = rank_and_name(key)
        return self.tensors.get(key) if rank is None else self.own_of(rank).get(name)

    def keys(self) -> Collection[str]:
        """Return the names of all tensors; membership tests take constant time."""
        return self

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.find(key) is not None

    def __iter__(self) -> Iterator[str]:
        yield from self.tensors
        for rank in range(self.num_ranks):
            yield from (f"{OF_RANK}{rank}/{name}" for name in self.own_of(rank))

    def __len__(self) -> int:
        return len(self.tensors) + sum(count * len(self.kinds[kind]) for count, kind in self.own)

    def keys_under(self, prefix: str) -> list[str]:
        """Return names that begin with ``prefix``; for one rank's prefix, without visiting other ranks."""
        rank, name = rank_and_name(prefix)
        if rank is not None:
            return [f"{OF_RANK}{rank}/{own}" for own in self.own_of(rank) if own.startswith(name)]
        all_keys = self.keys() if OF_RANK.startswith(prefix) or prefix.startswith(OF_RANK) else self.tensors
        return [key for key in all_keys if key.startswith(prefix)]

    def to_bytes(self) -> bytes:
        """Return ``tensors.json``, with shared patterns written once."""
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
        """Parse the output of :meth:`to_bytes`.

        Args:
            data: of it.
            most_ranks: bound on ranks with local tensors, such as the number of files.

        Raises:
            ValueError, LookupError, TypeError, AttributeError: if it is malformed.
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
            raise ValueError("it lists more ranks than there are files")
        if any(kind >= len(kinds) for _, kind in own) or any(key.startswith(OF_RANK) for key in tensors):
            raise ValueError("its tensors of ranks are inconsistent")
        if any(not len(e.shape) == len(p.begin) == len(p.end) for e in tensors.values() for p in e.places):
            raise ValueError("a tensor has boxes with another number of dims")
        return cls(tensors, kinds, own)


def rank_and_name(key: str) -> tuple[int | None, str]:
    """Split the key of a rank-local tensor into rank and name; the rank is ``None`` for other tensors."""
    number, slash, name = key.removeprefix(OF_RANK).partition("/")
    if not key.startswith(OF_RANK) or not slash or not (number.isdecimal() and len(number) < _DIGITS):
        return None, key
    return int(number), name


def box_of_rank(key: str, shape: tuple[int, ...]) -> StoredBox | None:
    """Return the box of a rank-local tensor, which is whole in the rank's own file; ``None`` for other tensors."""
    rank, _ = rank_and_name(key)
    return None if rank is None else StoredBox(*extent_of(shape), file_of(rank), key)


def in_runs(kinds: Iterable[int]) -> list[tuple[int, int]]:
    """Return the run-length encoding of ``kinds``: pairs of count and kind."""
    runs: list[tuple[int, int]] = []
    for kind in kinds:
        if runs and runs[-1][1] == kind:
            runs[-1] = (runs[-1][0] + 1, kind)
        else:
            runs.append((1, kind))
    return runs


def boxes_from_json(data: bytes) -> dict[str, list[Box]]:
    """Parse one box file: boxes by key.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: if it is malformed.
    """
    return {
        key: [(naturals(offsets), naturals(sizes), natural(rank)) for offsets, sizes, rank in boxes]
        for key, boxes in parse_json(data)["tensors"].items()
    }


def _place(file: Any, begin: Any, end: Any) -> BoxPlace:
    return BoxPlace(natural(file), naturals(begin), naturals(end))
