"""Division of a checkpoint's metadata among the ranks of a large run.

A record per file and a line per box grow with the number of ranks; one file of them would be written by one rank and
read by all. So consecutive ranks share a list of their files, and consecutive groups of ranks with equal boxes share a
box file, each written by its first rank. A small run has one file, written by the first rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainwright.checkpoint.exchange.distinct import EqualRanks

RANKS_PER_LIST = 256
"""Files per list: about the square root of the largest world sizes."""
MOST_UNDIVIDED = 4 * 2**20
"""Most bytes of boxes in a single file, which is read in tenths of a second."""

_LEAST = 256 * 2**10
# Bytes that one more box file adds to what every rank reads: its record and bounds of its tensors.
_BYTES_PER_FILE = 512


@dataclass(frozen=True)
class MetadataSplit:
    """Division of metadata.

    Args:
        num_ranks: world size.
        firsts: first rank of each group of equal ranks.
        groups: groups per box file.
        ranks: ranks per list of files.
    """

    num_ranks: int
    firsts: tuple[int, ...]
    groups: int
    ranks: int

    @property
    def lists(self) -> list[tuple[str, int]]:
        """Name of each list of files, and the rank that writes it."""
        return [(_name("files", number), first) for number, first in enumerate(range(0, self.num_ranks, self.ranks))]

    @property
    def boxes(self) -> list[tuple[str, int]]:
        """Name of each box file, and the rank that writes it."""
        return [(boxes_file(number), first) for number, first in enumerate(self.firsts[:: self.groups])]

    def boxes_of(self, number: int) -> int:
        """Return the number of the box file of a group."""
        return number // self.groups

    def list_of(self, rank: int) -> range:
        """Return the ranks in the same list of files as ``rank``."""
        begin = rank - rank % self.ranks
        return range(begin, min(begin + self.ranks, self.num_ranks))


def boxes_file(number: int) -> str:
    """Return the name of a box file."""
    return _name("boxes", number)


def _name(what: str, number: int) -> str:
    return f"{what}_{number:05d}.json"


def divide_metadata(equal: EqualRanks) -> MetadataSplit | None:
    """Return the division, the same on all ranks; ``None``: not divided.

    A rank reads its own box file and a part of the directory per box file; the size of files minimizes the sum.

    Args:
        equal: of the ranks' packed boxes.
    """
    total, count = sum(equal.lengths), len(equal.firsts)
    if len(equal.of_rank) <= RANKS_PER_LIST and total <= MOST_UNDIVIDED:
        return None
    mean = max(1.0, total / count)
    groups = max(math.ceil(_LEAST / mean), round(math.sqrt(_BYTES_PER_FILE * count / mean)), 1)
    return MetadataSplit(len(equal.of_rank), tuple(equal.firsts), groups, RANKS_PER_LIST)
