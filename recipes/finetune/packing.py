"""TokenRows of equal length from documents of any length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple


class DocumentPiece(NamedTuple):
    """A part of a document: its tokens ``begin`` to ``end`` are read, and the token behind each is predicted."""

    document: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Positions that it takes."""
        return self.end - self.begin


def pieces_of(lengths: Sequence[int], seq_len: int, split: bool) -> list[DocumentPiece]:
    """Cut documents into pieces that fit a row.

    Args:
        lengths: tokens of each document.
        seq_len: tokens of a row.
        split: cut a longer document into several pieces, which together predict each of its tokens but the first
            once; off: keep its beginning alone.
    """
    return [
        DocumentPiece(number, begin, min(begin + seq_len, length - 1))
        for number, length in enumerate(lengths)
        for begin in (range(0, length - 1, seq_len) if split else range(min(1, max(0, length - 1))))
    ]


def pack(pieces: Sequence[DocumentPiece], seq_len: int) -> list[list[DocumentPiece]]:
    """Put pieces into as few rows as best-fit decreasing finds: each into the fullest row that has room for it.

    The rows depend on the pieces alone. Johnson, "Near-optimal bin packing algorithms" (1973): at most 11/9 of the
    fewest rows, plus 4.
    """
    rows: list[list[DocumentPiece]] = []
    room: list[tuple[int, int]] = []  # what is free in a row, and its number
    for piece in sorted(pieces, key=lambda piece: piece.size, reverse=True):
        place = bisect_left(room, (piece.size, -1))
        if place == len(room):
            rows.append([])
            room.append((seq_len, len(rows) - 1))
        free, row = room.pop(place)
        rows[row].append(piece)
        insort(room, (free - piece.size, row))
    return rows
