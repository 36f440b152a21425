"""Packing of documents of any length into rows of equal length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple


class DocumentPiece(NamedTuple):
    """Part of a document: tokens ``begin`` to ``end`` are inputs, each predicts the next token."""

    document: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of its positions."""
        return self.end - self.begin


def pieces_of(lengths: Sequence[int], seq_len: int, split: bool) -> list[DocumentPiece]:
    """Cut documents into pieces that fit into a row.

    Args:
        lengths: tokens per document.
        seq_len: tokens per row.
        split: cut a longer document into several pieces, which predict each of its tokens but the first once; off:
            keep only its beginning.
    """
    return [
        DocumentPiece(number, begin, min(begin + seq_len, length - 1))
        for number, length in enumerate(lengths)
        for begin in (range(0, length - 1, seq_len) if split else range(min(1, max(0, length - 1))))
    ]


def pack(pieces: Sequence[DocumentPiece], seq_len: int) -> list[list[DocumentPiece]]:
    """Pack pieces into rows by best-fit decreasing: each piece goes into the fullest row with room for it.

    Deterministic in the pieces. Johnson, "Near-optimal bin packing algorithms" (1973): at most 11/9 of the fewest rows,
    plus 4.
    """
    rows: list[list[DocumentPiece]] = []
    room: list[tuple[int, int]] = []  # free positions of a row, and its index
    for piece in sorted(pieces, key=lambda piece: piece.size, reverse=True):
        place = bisect_left(room, (piece.size, -1))
        if place == len(room):
            rows.append([])
            room.append((seq_len, len(rows) - 1))
        free, row = room.pop(place)
        rows[row].append(piece)
        insort(room, (free - piece.size, row))
    return rows
