"""Partitioning of the samples of an epoch over data ranks, and of the rest when the ranks change. Free of torch.

An epoch is a list of indices in an order that every rank knows. It is dealt in *waves*: what all data ranks read at the
same time. What has been read is a short history, one :class:`Read` per layout, from which any later layout computes and
deals the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from trainwright.core.config.targets import function_at
from trainwright.core.global_batch import Waves
from trainwright.trainer.balance.shares import PassShares

PARTITIONS = ("interleave", "range", "hash")
VIRTUAL_SHARDS = 4096

DataKey = Callable[[Any, int], str | int | bytes]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Read:
    """A part of an epoch as one layout has read it.

    Args:
        partition: how samples were dealt, one of :data:`PARTITIONS`; or ``"leased"`` in chunks.
        samples: with ``"interleave"``, number of consecutive samples; with ``"leased"``, number of samples.
        data_ranks: otherwise, number of data ranks,
        micro_batch_size: samples that each read at a time,
        waves: and how often.
        ranges: with ``"leased"``, ordered positions ``[first, last)`` in the rest.
    """

    partition: str
    samples: int = 0
    data_ranks: int = 0
    micro_batch_size: int = 0
    waves: int = 0
    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_ranges(cls, ranges: Sequence[tuple[int, int]]) -> Read:
        """Return an entry for ordered, disjoint positions ``[first, last)`` in the rest."""
        samples = sum(last - first for first, last in ranges)
        if not ranges or (len(ranges) == 1 and ranges[0][0] == 0):
            return cls("interleave", samples)
        return cls("leased", samples, ranges=tuple((first, last) for first, last in ranges))

    def to_json(self) -> list[Any]:
        """Return a short list."""
        if self.partition == "interleave":
            return [self.partition, self.samples]
        if self.partition == "leased":
            return [self.partition, [list(bounds) for bounds in self.ranges]]
        return [self.partition, self.data_ranks, self.micro_batch_size, self.waves]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Read:
        """Return the inverse of :meth:`to_json`."""
        name, *numbers = value
        if name == "leased":
            return cls.of_ranges([(first, last) for first, last in numbers[0]])
        return cls(name, *numbers) if name == "interleave" else cls(name, 0, *numbers)

    def merge(self, later: Read) -> Read | None:
        """Return both as one, if dealing would have continued the same way; else ``None``."""
        if self.partition != later.partition or self.partition == "leased":
            return None
        if self.partition == "interleave":
            return Read(self.partition, self.samples + later.samples)
        if (self.data_ranks, self.micro_batch_size) != (later.data_ranks, later.micro_batch_size):
            return None
        return Read(self.partition, 0, self.data_ranks, self.micro_batch_size, self.waves + later.waves)


def add_read(history: Sequence[Read], read: Read) -> tuple[Read, ...]:
    """Return the history with one more entry, as short as possible."""
    if not read.samples and not read.waves:
        return tuple(history)
    merged = history[-1].merge(read) if history else None
    return (*history[:-1], merged) if merged else (*history, read)


class RangePartition:
    """Rank r reads the r-th of equal contiguous ranges of indices: neighbours on disk stay on one rank."""

    name = "range"

    def queues(self, indices: Indices, data_ranks: int) -> list[Indices]:
        """Return the positions in ``indices`` that each data rank reads, in ascending order."""
        return [np.sort(part) for part in np.array_split(np.argsort(indices, kind="stable"), data_ranks)]


class HashPartition:
    """The rank of a sample depends on a stable hash of its key, so that most samples keep theirs when ranks change.

    Key -> one of 4096 virtual shards by BLAKE2b -> rank by jump consistent hashing (Lamping and Veach 2014, "A Fast,
    Minimal Memory, Consistent Hash Algorithm"): adding a rank to n moves about 1 / (n + 1) of the samples.

    Args:
        key_of: index -> key, a ``str``, ``int`` or ``bytes``; ``None``: the index. Called once per index.
        key_name: its name in a checkpoint.
    """

    name = "hash"

    def __init__(self, key_of: Callable[[int], str | int | bytes] | None = None, key_name: str | None = None) -> None:
        self.key_name = key_name
        self._key_of = key_of
        self._shards = np.full(0, -1, dtype=np.int64)

    def queues(self, indices: Indices, data_ranks: int) -> list[Indices]:
        """See :class:`RangePartition`."""
        owners = np.array(_ranks_of_shards(data_ranks))[self._shards_of(indices)]
        return [np.flatnonzero(owners == rank) for rank in range(data_ranks)]

    def _shards_of(self, indices: Indices) -> Indices:
        size = int(indices.max()) + 1 if len(indices) else 0
        if size > len(self._shards):
            self._shards = np.concatenate([self._shards, np.full(size - len(self._shards), -1, dtype=np.int64)])
        for index in np.unique(indices[self._shards[indices] < 0]).tolist():
            self._shards[index] = shard_of(index if self._key_of is None else self._key_of(index))
        return self._shards[indices]


SamplePartition = RangePartition | HashPartition


def shard_of(key: Any) -> int:
    """Return the virtual shard of a key, a ``str``, ``int`` or ``bytes``; equal in every process and version.

    Raises:
        ValueError: if the key is of another type.
    """
    if isinstance(key, Integral):
        key = str(int(key))
    if isinstance(key, str):
        key = key.encode()
    if not isinstance(key, bytes):
        raise ValueError(
            f"data_key returned {key!r}, a {type(key).__name__}; allowed are str, int and bytes, equal on all ranks."
        )
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") % VIRTUAL_SHARDS


@lru_cache
def _ranks_of_shards(data_ranks: int) -> list[int]:
    # Jump hashing needs keys that differ in all bits.
    digests = (hashlib.blake2b(shard.to_bytes(4, "little"), digest_size=8) for shard in range(VIRTUAL_SHARDS))
    return [jump_hash(int.from_bytes(digest.digest(), "little"), data_ranks) for digest in digests]


def jump_hash(key: int, buckets: int) -> int:
    """Return the bucket of a 64-bit key, by the jump consistent hash of Lamping and Veach (2014)."""
    bucket, following = -1, 0
    while following < buckets:
        bucket = following
        key = (key * 2862933555777941757 + 1) % 2**64
        following = int((bucket + 1) * (2**31 / ((key >> 33) + 1)))
    return bucket


def resolve_data_key(data_key: str | DataKey | None) -> DataKey | None:
    """Return the function for ``Trainer(data_key=...)``.

    Raises:
        ValueError: if there is none.
    """
    if isinstance(data_key, str):
        what = "a function of the data set and an index that returns a str, int or bytes"
        return cast(DataKey, function_at("data_key", data_key, what))
    if data_key is not None and not callable(data_key):
        raise ValueError(
            f"data_key={data_key!r} (allowed: a function (dataset, index) -> str | int | bytes, or a path, 'a.b:f')."
        )
    return data_key


def name_of_key(data_key: DataKey) -> str:
    """Return the name of a key function in a checkpoint."""
    name = getattr(data_key, "__qualname__", type(data_key).__qualname__)
    return f"{getattr(data_key, '__module__', '')}:{name}"


class InOrder:
    """``"interleave"``: waves in the order of the epoch.

    Args:
        indices: the whole epoch.
        start: samples of it that have been read.
        waves: how the rest is dealt, see :class:`~trainwright.core.global_batch.Waves`.
        shares: cuts of waves; ``None``: equal parts.
    """

    def __init__(self, indices: Sequence[int], start: int, waves: Waves, shares: PassShares | None = None) -> None:
        self.waves = waves
        self._shares = shares
        self._indices = indices
        self._start = start
        self._micro = waves.micro_batch_size
        self._starts: dict[int, range] = {}  # of each rank's full batches, where parts are equal

    def __len__(self) -> int:
        return len(self.waves)

    @property
    def regular(self) -> int:
        """Waves, from the first on, whose loss is divided only by the accumulation."""
        waves = self.waves
        if waves.step_samples or self._shares is not None:
            return 0
        # Global batches that end within the epoch are complete.
        return waves.regular if waves.group <= 1 else waves.samples // (waves.group * waves.wave_size) * waves.group

    def batch(self, wave: int, rank: int) -> list[int]:
        """Return the indices that ``rank`` reads in ``wave``; another rank's sample if it has none."""
        starts = self._starts.get(rank)
        if starts is not None and wave < len(starts):  # most batches; saves a call
            first = self._start + starts[wave]
            return list(self._indices[first : first + self._micro])
        first, last = self._part(wave, rank)
        if first == last:
            first = self.waves.bounds(wave)[0]
            last = first + 1
        return list(self._indices[self._start + first : self._start + last])

    def count(self, wave: int, rank: int) -> int:
        """Return the number of ``rank``'s own samples in ``wave``."""
        first, last = self._part(wave, rank)
        return last - first

    def _part(self, wave: int, rank: int) -> tuple[int, int]:
        if self._shares is None:
            starts = self._starts.get(rank)
            if starts is None:
                starts = self._starts[rank] = self.waves.starts(rank)
            if wave >= len(starts):
                return self.waves.share(wave, rank)
            return starts[wave], starts[wave] + self._micro
        begin, end = self.waves.bounds(wave)
        first, last = self._shares.part(wave, end - begin, rank)
        return begin + first, begin + last

    def wave_total(self, wave: int) -> int:
        """Return the number of samples of all ranks in ``wave``."""
        first, last = self.waves.bounds(wave)
        return last - first

    def step_total(self, wave: int) -> int:
        """Return the number of samples of all ranks in the optimizer step of ``wave``."""
        return self.waves.group_size(wave)

    def read(self, waves: int) -> Read:
        """Return what the first ``waves`` waves read."""
        return Read("interleave", self.waves.bounds(waves)[0] if waves < len(self) else self.waves.samples)


class InQueues:
    """Each rank reads its own samples, ``micro_batch_size`` at a time; those that have run out wait for the others.

    Args:
        indices: the rest of the epoch, in order.
        partition: of samples.
        data_ranks: number of data ranks.
        micro_batch_size: samples that each reads at a time.
        group: waves per optimizer step.
        drop_last: leave out optimizer steps in which a rank has an incomplete part.
    """

    def __init__(
        self,
        indices: Indices,
        partition: SamplePartition,
        data_ranks: int,
        micro_batch_size: int,
        group: int,
        drop_last: bool,
    ) -> None:
        self._indices = indices
        self._name = partition.name
        self._queues = partition.queues(indices, data_ranks)
        self._micro = micro_batch_size
        self._group = max(group, 1)
        self._full = min(len(queue) for queue in self._queues) // micro_batch_size
        self._waves = self.regular if drop_last else -(-max(map(len, self._queues)) // micro_batch_size)

    def __len__(self) -> int:
        return self._waves

    @property
    def regular(self) -> int:
        """See :class:`InOrder`."""
        return self._full // self._group * self._group

    def batch(self, wave: int, rank: int) -> list[int]:
        """See :class:`InOrder`."""
        if not self.count(wave, rank):
            rank = max(range(len(self._queues)), key=lambda other: self.count(wave, other))
            return self._own(wave, rank)[:1]
        return self._own(wave, rank)

    def _own(self, wave: int, rank: int) -> list[int]:
        positions = self._queues[rank][wave * self._micro : (wave + 1) * self._micro]
        own: list[int] = self._indices[positions].tolist()
        return own

    def count(self, wave: int, rank: int) -> int:
        """See :class:`InOrder`."""
        return min(max(len(self._queues[rank]) - wave * self._micro, 0), self._micro)

    def wave_total(self, wave: int) -> int:
        """See :class:`InOrder`."""
        return sum(self.count(wave, rank) for rank in range(len(self._queues)))

    def step_total(self, wave: int) -> int:
        """See :class:`InOrder`."""
        first = wave // self._group * self._group
        return sum(self.wave_total(other) for other in range(first, min(first + self._group, len(self))))

    def read(self, waves: int) -> Read:
        """See :class:`InOrder`."""
        return Read(self._name, 0, len(self._queues), self._micro, min(waves, len(self)))

    def rest(self, waves: int) -> Indices:
        """Return the indices, in order, that remain after so many waves."""
        taken = [queue[: waves * self._micro] for queue in self._queues]
        keep = np.ones(len(self._indices), dtype=bool)
        keep[np.concatenate(taken)] = False
        return self._indices[keep]


Dealing = InOrder | InQueues
"""How the rest of an epoch is dealt to data ranks."""


def as_indices(indices: Sequence[Any], partition: str) -> Indices:
    """Return the indices of an epoch as an array.

    Raises:
        ValueError: if they are not integers.
    """
    found = np.asarray(indices)
    if not len(found):
        return np.empty(0, dtype=np.int64)
    if not np.issubdtype(found.dtype, np.integer):
        raise ValueError(
            f"data_partition={partition!r} needs a sampler that yields whole numbers, but this one yields "
            f"{type(indices[0]).__name__}. Use data_partition='interleave', which deals anything."
        )
    return found.astype(np.int64)


def remaining(
    indices: Sequence[int], history: Sequence[Read], partitions: Callable[[str], SamplePartition]
) -> tuple[Sequence[int], int]:
    """Return what a history leaves of an epoch: indices in order, and how many of the first ones were read.

    Args:
        indices: the whole epoch.
        history: what was read.
        partitions: returns the partition of a name.
    """
    start = 0
    for read in history:
        if read.partition == "interleave":
            start = min(start + read.samples, len(indices))
            continue
        if read.partition == "leased":
            indices, start = _without(indices[start:], read.ranges), 0
            continue
        rest = as_indices(indices[start:], read.partition)
        queues = InQueues(rest, partitions(read.partition), read.data_ranks, read.micro_batch_size, 1, False)
        indices, start = queues.rest(read.waves).tolist(), 0
    return indices, start


def _without(indices: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Sequence[int]:
    """Return ``indices`` without the positions ``[first, last)``."""
    rest: list[int] = []
    after = 0
    for first, last in ranges:
        rest.extend(indices[after:first])
        after = last
    rest.extend(indices[after:])
    return rest
