"""How what a checkpoint says of its files and boxes is divided among the ranks of a large run.

Two things grow with the ranks: a record of the file of each, and a line for each box. One file for all of them would be
made by one rank and read whole by all. So ranks that follow each other have a list of their files together, written by
the first of them; and kin (those that hold the same) that follow each other have a file of their boxes, written by the
first of these. A small run has one file for all, made by the first rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainwright.checkpoint.exchange.distinct import Kin

RANKS_OF_A_LIST = 256
"""Files that one list names: the square root of as many ranks as there are anywhere."""
MOST_WHOLE = 4 * 2**20
"""Bytes of boxes, as ranks say them, up to which one file has them all: read in tenths of a second."""

_LEAST = 256 * 2**10
# What one more file of boxes adds to what every rank reads: its record, and where the tensors in it begin.
_OF_A_FILE = 512


@dataclass(frozen=True)
class ListSplit:
    """Who writes down what.

    Args:
        num_ranks: all of them.
        firsts: of each kin, by its number, the first rank.
        kins: how many kin have one file of boxes.
        ranks: how many ranks have one list of files.
    """

    num_ranks: int
    firsts: tuple[int, ...]
    kins: int
    ranks: int

    @property
    def lists(self) -> list[tuple[str, int]]:
        """Name of each list of files, and the rank that writes it."""
        return [(_name("files", number), first) for number, first in enumerate(range(0, self.num_ranks, self.ranks))]

    @property
    def boxes(self) -> list[tuple[str, int]]:
        """Name of each file of boxes, and the rank that writes it."""
        return [(boxes_file(number), first) for number, first in enumerate(self.firsts[:: self.kins])]

    def boxes_of(self, kin: int) -> int:
        """Number of the file that has the boxes of a kin."""
        return kin // self.kins

    def list_of(self, rank: int) -> range:
        """The ranks whose files one list names, with those of ``rank``."""
        begin = rank - rank % self.ranks
        return range(begin, min(begin + self.ranks, self.num_ranks))


def boxes_file(number: int) -> str:
    """Name of a file of boxes."""
    return _name("boxes", number)


def _name(what: str, number: int) -> str:
    return f"{what}_{number:05d}.json"


def split_of(kin: Kin) -> ListSplit | None:
    """How to divide, which all ranks find alike; ``None``: not at all.

    A rank reads the file with its own boxes and something of each such file, so files become as large as makes both
    together the least.

    Args:
        kin: of what ranks say of their boxes.
    """
    total, count = sum(kin.lengths), len(kin.firsts)
    if len(kin.of_rank) <= RANKS_OF_A_LIST and total <= MOST_WHOLE:
        return None
    mean = max(1.0, total / count)
    kins = max(math.ceil(_LEAST / mean), round(math.sqrt(_OF_A_FILE * count / mean)), 1)
    return ListSplit(len(kin.of_rank), tuple(kin.firsts), kins, RANKS_OF_A_LIST)
