"""Arithmetic of shards: what remains of them, and which worker reads which part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

# Size of a shard of unknown size: greater than any.
UNKNOWN = 2**62


class ShardPiece(NamedTuple):
    """Samples ``[start, stop)`` of a shard, in the epoch's reading order of it."""

    shard: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.stop - self.start


class Pieces:
    """A growing set of samples, stored as few pieces.

    Args:
        pieces: initial content.
    """

    def __init__(self, pieces: Iterable[Sequence[int]] = ()) -> None:
        self._bounds: dict[int, list[list[int]]] = {}
        self.add(pieces)

    def add(self, pieces: Iterable[Sequence[int]]) -> None:
        """Add samples."""
        for shard, start, stop in pieces:
            bounds = self._bounds.setdefault(shard, [])
            for bound in bounds:
                if bound[1] == start:
                    bound[1] = stop
                    break
            else:
                bounds.append([start, stop])

    def __iter__(self) -> Iterator[ShardPiece]:
        return (ShardPiece(shard, *bound) for shard, bounds in self._bounds.items() for bound in sorted(bounds))

    def to_json(self) -> list[list[int]]:
        """Return plain values, which the constructor accepts."""
        return [list(piece) for piece in self]

    def missing(self, order: Iterable[int], sizes: Sequence[int]) -> list[ShardPiece]:
        """Return the samples of shards that are not in the set.

        Args:
            order: the shards, in the order of the result.
            sizes: samples of each shard.
        """
        found = []
        for shard in order:
            start = 0
            for first, stop in sorted([*self._bounds.get(shard, ()), [sizes[shard], UNKNOWN]]):
                if start < first:
                    found.append(ShardPiece(shard, start, first))
                start = max(start, stop)
        return found

    def rest(self, piece: ShardPiece) -> ShardPiece:
        """Return the rest of a piece that is read from its start; may be empty."""
        start = piece.start
        for first, stop in sorted(self._bounds.get(piece.shard, ())):
            if first <= start < stop:
                start = min(stop, piece.stop)
        return piece._replace(start=start)


def deal(
    pieces: Sequence[ShardPiece], micro: int, rank: int, ranks: int, worker: int, workers: int
) -> list[ShardPiece]:
    """Return what a worker of a data rank reads of ``pieces``.

    If all sizes are known, each rank gets the same number of samples, within one, and each of its workers whole
    micro-batches, except for the last one. Else whole pieces are dealt in turn, to the first worker of each rank first.

    Args:
        pieces: the rest of an epoch, equal on every rank.
        micro: samples per micro-batch.
        rank: data rank.
        ranks: number of data ranks.
        worker: index of the worker.
        workers: number of workers of each rank.
    """
    if any(piece.stop == UNKNOWN for piece in pieces):
        return list(pieces[rank::ranks][worker::workers])
    total = sum(piece.size for piece in pieces)
    first, last = rank * total // ranks, (rank + 1) * total // ranks
    batches = -(-(last - first) // micro)
    # A loader polls its workers in turn: the w-th of them makes every w-th batch, and one of them the last.
    sizes = [-(-(batches - each) // workers) * micro for each in range(workers)]
    sizes[(batches - 1) % workers] -= batches * micro - (last - first)
    first += sum(sizes[:worker])
    return _cut(pieces, first, first + sizes[worker])


def _cut(pieces: Iterable[ShardPiece], first: int, last: int) -> list[ShardPiece]:
    """Return samples ``[first, last)`` of the concatenated pieces."""
    found, before = [], 0
    for shard, start, stop in pieces:
        part = ShardPiece(shard, max(start, start + first - before), min(stop, start + last - before))
        if part.size > 0:
            found.append(part)
        before += stop - start
    return found
