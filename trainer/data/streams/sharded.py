"""Streams of shards: each data rank reads its own, and any number of ranks resumes the rest of an epoch."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainwright.trainer.data.streams.pieces import UNKNOWN, Pieces, ShardPiece, deal
from trainwright.trainer.data.streams.sources import shards_of

# What was read, and its samples: one, or none at the end of a shard.
_Read = tuple[ShardPiece, list[Any]]


class ShardedStream(IterableDataset[Any]):
    """Data in shards, of which each data rank and each of its workers reads its own.

    An epoch visits the shards in an order drawn from the seed and the epoch. Each worker reads ``shards_at_once`` of
    them in turn, in shuffled blocks of ``buffer / shards_at_once`` samples: a sample moves only within its block. What
    was read of each shard is saved with a run, so that any number of ranks and workers reads the rest. Without a
    ``trainwright.Trainer`` the shards are dealt only to the workers of the loader.

    Args:
        data: a ``datasets.Dataset`` or ``datasets.IterableDataset`` (not shuffled), a ``StreamingDataset`` of MosaicML
            Streaming or of LitData, tar files as of WebDataset (a path, a pattern such as ``"data/*.tar"``, or a list
            of them; local or of fsspec), or any object with ``sizes`` and ``read`` like those of
            :class:`~trainwright.trainer.data.streams.sources.Shards`.
        shuffle: off: shards and samples in their order, one shard at a time.
        buffer: samples that each worker holds in memory to shuffle them.
        shards_at_once: shards that each worker mixes.

    Raises:
        ValueError: if the data contain pickles, are shuffled or split already, or have no shard.
        TypeError: for other data.
    """

    def __init__(self, data: Any, *, shuffle: bool = True, buffer: int = 1000, shards_at_once: int = 4) -> None:
        if not 1 <= shards_at_once <= buffer:
            raise ValueError(
                f"ShardedStream was given shards_at_once={shards_at_once} and buffer={buffer}, but each open shard "
                f"needs a place in the buffer. Use shards_at_once from 1 to buffer."
            )
        self.shards = shards_of(data)
        self.shuffle = shuffle
        self.block = buffer // shards_at_once if shuffle else 1
        self.shards_at_once = shards_at_once if shuffle else 1

    @property
    def sizes_known(self) -> bool:
        """True if the number of samples of each shard is known before it is read."""
        return UNKNOWN not in self.shards.sizes

    @property
    def _fingerprint(self) -> str:
        """Description of data that must not change before a resume."""
        sizes = self.shards.sizes
        total = f"{sum(sizes)} samples in " if self.sizes_known else ""
        found = f"{total}{len(sizes)} shards of {type(self.shards).__name__}"
        return f"{found}, {self.shards_at_once} at once in blocks of {self.block}"

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        mine, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        pieces = deal(self.rest(0, 0, Pieces()), 1, 0, 1, mine, workers)
        for _, samples in Reading(self, pieces, 0, 0):
            yield from samples

    def rest(self, seed: int, epoch: int, read: Pieces) -> list[ShardPiece]:
        """Return the rest of an epoch, in its order of shards."""
        order = list(range(len(self.shards.sizes)))
        if self.shuffle:
            random.Random(f"{seed} {epoch}").shuffle(order)  # noqa: S311
        return read.missing(order, self.shards.sizes)

    def read(self, piece: ShardPiece, seed: int, epoch: int) -> Iterator[_Read]:
        """Read a piece; the end of a shard of unknown size is marked by an entry without a sample."""
        if not piece.size:
            return
        shard, start, stop = piece
        begin = start - start % self.block
        samples = iter(self.shards.read(shard, begin))
        for first in range(begin, stop, self.block):
            block = list(itertools.islice(samples, self.block))
            order = list(range(len(block)))
            if self.shuffle:
                random.Random(f"{seed} {epoch} {shard} {first}").shuffle(order)  # noqa: S311
            for place in range(max(start - first, 0), min(stop - first, len(block))):
                yield ShardPiece(shard, first + place, first + place + 1), [block[order[place]]]
            if len(block) < self.block:
                break
        if stop == UNKNOWN:
            yield ShardPiece(shard, max(start, first + len(block)), UNKNOWN), []


class Reading:
    """Reads pieces, some of them in turn.

    Args:
        stream: the stream.
        pieces: those of one worker in an epoch.
        seed: seed of the order.
        epoch: the epoch.
        turn: a :attr:`turn`, to resume there.
        read: what had been read by then.
    """

    def __init__(
        self,
        stream: ShardedStream,
        pieces: Sequence[ShardPiece],
        seed: int,
        epoch: int,
        turn: Sequence[int] = (),
        read: Pieces | None = None,
    ) -> None:
        self._pieces, self._read = pieces, lambda piece: stream.read(piece, seed, epoch)
        self._started, *places = turn or [0]
        rest = (read or Pieces()).rest
        self._reading = deque((place, self._read(rest(pieces[place]))) for place in places)
        if not turn:
            self._start(stream.shards_at_once)

    @property
    def turn(self) -> list[int]:
        """Number of pieces started, and those being read, the next one first."""
        return [self._started, *(place for place, _ in self._reading)]

    def __iter__(self) -> Iterator[_Read]:
        while self._reading:
            place, reader = self._reading.popleft()
            found = next(reader, None)
            if found is None:
                self._start(1)
            else:
                self._reading.append((place, reader))
                yield found

    def _start(self, count: int) -> None:
        for place in range(self._started, min(self._started + count, len(self._pieces))):
            self._reading.append((place, self._read(self._pieces[place])))
            self._started += 1


class Batch(NamedTuple):
    """Data that come with the samples of a micro-batch.

    Args:
        samples: their number; 0: the worker has read all of its part.
        worker: the worker that read it.
        read: its pieces.
        turn: the worker's position afterwards.
    """

    samples: int
    worker: int
    read: list[list[int]]
    turn: list[int]


class RankProgress:
    """Progress of a data rank in its part of an epoch; resuming from it is exact.

    Args:
        read: the samples.
        turns: position of each worker that has started.
        last: the worker of the last batch; -1: none.
    """

    def __init__(
        self, read: Iterable[Sequence[int]] = (), turns: Mapping[int, list[int]] | None = None, last: int = -1
    ) -> None:
        self.read, self.turns, self.last = Pieces(read), dict(turns or {}), last

    def add(self, batch: Batch) -> None:
        """Add a micro-batch."""
        self.read.add(batch.read)
        self.turns[batch.worker], self.last = batch.turn, batch.worker

    def copy(self) -> RankProgress:
        """Return an independent copy."""
        return RankProgress(self.read, self.turns, self.last)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"read": self.read.to_json(), "turns": [[*turn] for turn in self.turns.items()], "last": self.last}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RankProgress:
        """Return the inverse of :meth:`to_json`."""
        return cls(value["read"], dict(value["turns"]), value["last"])


class ShardBatches(IterableDataset[Any]):
    """The micro-batches of one data rank, each a list of samples with a :class:`Batch`; endless.

    A worker that has read all yields empty ones. If it ended, the loader would poll the others in an order that depends
    on timing.

    Args:
        stream: the stream.
        micro_batch_size: samples per micro-batch.
        data_rank: this rank.
        data_ranks: number of ranks.
    """

    def __init__(self, stream: ShardedStream, micro_batch_size: int, data_rank: int, data_ranks: int) -> None:
        self.stream = stream
        self._micro, self._rank, self._ranks = micro_batch_size, data_rank, data_ranks
        # Epoch and seed: persistent workers, which keep this object, read them when an epoch starts.
        self._control = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._resumed: tuple[int, list[ShardPiece], RankProgress] = (0, [], RankProgress())

    def resume(self, epoch: int, read: Iterable[ShardPiece], progress: RankProgress) -> None:
        """Leave out what was read of an epoch; call before workers start.

        Args:
            epoch: the epoch.
            read: what was read before samples were dealt as they are now.
            progress: what this rank has read since.
        """
        self._resumed = (epoch, list(read), progress.copy())

    def prepare(self, epoch: int, seed: int) -> None:
        """Set what the next iteration reads."""
        self._control[0], self._control[1] = epoch, seed

    def __iter__(self) -> Iterator[tuple[list[Any], Batch]]:
        worker = get_worker_info()
        mine, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        epoch, seed = self._control.tolist()
        resumed, before, progress = self._resumed
        if resumed != epoch:
            before, progress = [], RankProgress()
        rest = self.stream.rest(seed, epoch, Pieces(before))
        mine = (mine + progress.last + 1) % workers  # a loader polls its first worker first
        pieces = deal(rest, self._micro, self._rank, self._ranks, mine, workers)
        reading = Reading(self.stream, pieces, seed, epoch, progress.turns.get(mine, ()), progress.read)
        batch, read = [], Pieces()
        for piece, samples in reading:
            batch += samples
            read.add([piece])
            if len(batch) == self._micro:
                yield batch, Batch(len(batch), mine, read.to_json(), reading.turn)
                batch, read = [], Pieces()
        while True:
            yield batch, Batch(len(batch), mine, read.to_json(), reading.turn)
            batch, read = [], Pieces()


def uses_shards(loader: object) -> bool:
    """Return whether ``loader`` reads a :class:`ShardedStream`.

    Raises:
        ValueError: if it does so without batches.
    """
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, ShardedStream):
        return False
    if loader.batch_size is None:
        raise ValueError("A DataLoader over a ShardedStream has batch_size=None. Set it to the size of a micro-batch.")
    return True
