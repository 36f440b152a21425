"""Streams that every rank can read from the start, dealt so that each sample is read once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainwright.trainer.data.streams.loader import StreamLoader, Tag


class DealtStream(IterableDataset[Any]):
    """A stream that is equal on every rank, dealt to data ranks and their workers: each sample is read once.

    Every rank, and every worker of its loader, reads the whole stream and keeps its own part, as with map-style data:
    ``micro_batch_size x ranks`` samples at a time, of which rank r gets the r-th part. So a run resumes after any
    number of samples with any number of ranks and workers. Samples are skipped by ``samples.skip(n)``, an iterable that
    starts n samples later, if there is such a method; else they are read and dropped.

    Args:
        samples: an iterable that yields the same samples each time and in every process. If it has
            ``set_epoch(epoch)``, that is called before each epoch.

    Without a ``trainwright.Trainer`` it is dealt only to the workers of its loader.
    """

    def __init__(self, samples: Iterable[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return itertools.islice(iter(self.samples), first, None, step)

    def begin(self, epoch: int, skipped: int) -> Iterator[Any]:
        """Return the samples of an epoch after the first ``skipped``."""
        if callable(getattr(self.samples, "set_epoch", None)):
            self.samples.set_epoch(epoch)  # type: ignore[attr-defined]
        if skipped and callable(getattr(self.samples, "skip", None)):
            return iter(self.samples.skip(skipped))  # type: ignore[attr-defined]
        return itertools.islice(iter(self.samples), skipped, None)


class DealtBatches(IterableDataset[Any]):
    """The micro-batches of one data rank, each a list of samples with its :class:`Tag`.

    Args:
        stream: the whole stream.
        micro_batch_size: samples per rank and wave.
        data_rank: this rank.
        data_ranks: number of ranks.
        group: waves per optimizer step; 0 outside of training.
        drop_last: leave out an incomplete last step, or batch.
    """

    def __init__(
        self, stream: DealtStream, micro_batch_size: int, data_rank: int, data_ranks: int, group: int, drop_last: bool
    ) -> None:
        self.stream = stream
        self._micro = micro_batch_size
        self._rank = data_rank
        self._wave_size = micro_batch_size * data_ranks
        self._group = max(group, 1)
        self._kept_multiple = 1 if not drop_last else group * self._wave_size or micro_batch_size
        # Epoch and samples to skip: persistent workers, which keep this object, read them when an epoch starts.
        self._control = torch.zeros(2, dtype=torch.int64).share_memory_()

    def prepare(self, epoch: int, skipped: int) -> None:
        """Set what the next iteration reads."""
        self._control[0], self._control[1] = epoch, skipped

    def __iter__(self) -> Iterator[tuple[list[Any], Tag]]:
        worker = get_worker_info()
        mine, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        epoch, skipped = self._control.tolist()
        samples = self.stream.begin(epoch, skipped)
        for step in itertools.count():
            first_wave = step * self._group
            # A loader polls its workers in turn, so the w-th of them makes every w-th batch.
            own = {wave for wave in range(self._group) if (first_wave + wave) % workers == mine}
            kept, total = self._read_step(samples, own)
            yield from self._batches(kept, total - total % self._kept_multiple)
            if total < self._group * self._wave_size:
                return

    def _read_step(self, samples: Iterator[Any], own: set[int]) -> tuple[dict[int, list[Any]], int]:
        """Read the samples of a step and return those of this rank and worker by wave, and the number of all."""
        kept: dict[int, list[Any]] = {}
        total = 0
        for total, sample in enumerate(itertools.islice(samples, self._group * self._wave_size), start=1):
            wave, place = divmod(total - 1, self._wave_size)
            # The first of each wave is padding if this rank has none of its own.
            if wave in own and (place == 0 or place // self._micro == self._rank):
                kept.setdefault(wave, []).append(sample)
        return kept, total

    def _batches(self, kept: dict[int, list[Any]], total: int) -> Iterator[tuple[list[Any], Tag]]:
        for wave, samples in kept.items():
            in_wave = min(total - wave * self._wave_size, self._wave_size)
            if in_wave <= 0:
                return
            own = min(max(in_wave - self._rank * self._micro, 0), self._micro)
            yield samples[-own:] if own else samples[:1], Tag(own, in_wave, total)


class DealtLoader(StreamLoader):
    """The loader of a :class:`DealtStream` on one data rank.

    Args:
        loader: the user's loader over the stream.
        data_rank: this rank.
        data_ranks: number of ranks.
        group: waves per optimizer step; 1 if undefined, 0 outside of training.
    """

    def __init__(self, loader: DataLoader[Any], data_rank: int, data_ranks: int, group: int) -> None:
        stream, micro = loader.dataset, loader.batch_size
        assert isinstance(stream, DealtStream)
        assert micro is not None
        self._batches = DealtBatches(stream, micro, data_rank, data_ranks, group, loader.drop_last)
        super().__init__(loader, self._batches, data_ranks, group)
        self._samples: dict[int, int] = {}

    def _begin(self) -> None:
        super()._begin()
        resumed = self._of_this_epoch
        self._batches.prepare(self.epoch, resumed.samples)
        self._samples = {resumed.first_batch: resumed.samples}

    def _tagged(self) -> Iterator[tuple[Any, Tag, int]]:
        for batch, numbers in self.loader:
            tag = Tag(*numbers)
            yield batch, tag, tag.wave

    def _remember(self, index: int, read: int) -> None:
        self._samples[index + 1] = self._samples[index] + read
        self._samples.pop(index - self.group - self._REMEMBERED, None)

    def position(self, batches: int) -> dict[str, Any]:
        """See :class:`StreamLoader`."""
        samples = self._samples[batches] if self._samples else self._of_this_epoch.samples
        return {"samples": samples, "history": [], "passes": 0}


def uses_stream(loader: object) -> bool:
    """Return whether ``loader`` reads batches of a :class:`DealtStream`."""
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, DealtStream) and loader.batch_size is not None
