"""Loaders of unknown length with equal numbers of batches on all ranks, and streams that every rank reads whole.

An ``IterableDataset`` may give one rank more batches than another, and the rank that runs out first would leave the
others in their next collective. So each rank fetches one batch ahead, and all exchange whether they have it while the
current step runs.

A stream that does not split itself gives every rank the same batches. Ranks detect that by comparing their first ones,
and then each keeps its own of every wave. They keep comparing, and raise if streams diverge.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from trainwright.strategies.contract.batch_digest import batch_digest
from trainwright.trainer.data.remembered_states import state_source
from trainwright.trainer.data.streams.loader import Tag, TaggedLoader
from trainwright.trainer.data.wrapped_loader import innermost

_INSTEAD = (
    "Type DataLoader(trainwright.DealtStream(dataset), ...), which deals single samples and resumes exactly, or "
    "trainwright.ShardedStream for data in shards; or split the dataset by "
    "trainer.strategy.ranks.data_rank and trainer.strategy.ranks.num_data_ranks."
)

# In place of a batch: there is none left.
_END = object()


@dataclass(frozen=True)
class Reader:
    """The reader of a loader.

    Args:
        data_rank: index among ranks that read different samples.
        data_ranks: their number.
        world_size: number of all ranks.
        training: whether it is a training loader.
        deals: whether to deal a stream that is equal on all ranks.
        waves: micro-batches per optimizer step on each data rank, if a global batch is set; else 1.
        drop_last: leave out an incomplete last step.
        position: returns the index in the epoch of the next batch.
    """

    data_rank: int
    data_ranks: int
    world_size: int
    training: bool
    deals: bool
    waves: int
    drop_last: bool
    position: Callable[[], int]


@dataclass
class _Step:
    """This rank's batches of an optimizer step, one for each wave."""

    count: int = 0  # batches of all data ranks
    digest: int = 0
    batches: list[tuple[Any, Tag]] = field(default_factory=list)


class EvenLoader(TaggedLoader):
    """Gives every rank the same number of batches of a loader of unknown length.

    Streams that split themselves: in training all ranks stop with the first that has run out, and warn; in evaluation
    they continue until the last has run out, and others repeat their last batch as padding. Streams that are equal on
    all ranks are dealt batch by batch: each is used once, and the last ones of training are weighted by samples.

    Args:
        loader: this rank's loader.
        group: a gloo group of all ranks, not used for training, so that its messages overlap.
        reader: this rank.

    Attributes:
        is_dealt: true if the stream is equal on all ranks, so that each keeps its own of every wave.
        limit: most batches of an evaluation: of all data ranks, if the stream is dealt; ``None``: all.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup, reader: Reader) -> None:
        super().__init__(loader)
        self._group, self._reader, self.data_ranks = group, reader, reader.data_ranks
        self._real = float("inf")
        self._tags = {}
        self._first = 0
        self.is_dealt = False
        self.limit: int | None = None

    def is_padding(self, batch_idx: int) -> bool:
        """Return whether the ``batch_idx``-th batch of the current pass is padding."""
        return super().is_padding(batch_idx) if batch_idx in self._tags else batch_idx >= self._real

    def loss_divisor(self, batch_idx: int, accumulation: int, whole_step: bool) -> float:
        """See :meth:`trainwright.trainer.data.data_order.RankBatchSampler.loss_divisor`."""
        is_tagged = batch_idx in self._tags
        return super().loss_divisor(batch_idx, accumulation, whole_step) if is_tagged else accumulation

    def __iter__(self) -> Iterator[Any]:
        self._real, self._tags = float("inf"), {}
        self._first = self._reader.position() if self._reader.training else 0
        batches = self._read()
        batch = next(batches, _END)
        self.is_dealt = self._reader.deals and self._is_same(batch)
        if not self.is_dealt:
            yield from self._read_own(batches, batch)
            return
        self._check_dealt()
        yield from self._read_dealt(islice(chain([batch], batches), self.limit))

    def _read(self) -> Iterator[Any]:
        """Yield the loader's batches, as if data ranks were the only ranks."""
        with _as_data_rank(self._reader):
            batches = iter(self.loader)
        while True:
            with _as_data_rank(self._reader):
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch

    # ---- streams that split themselves ----------------------------------------------------------------------------

    def _read_own(self, batches: Iterator[Any], batch: Any) -> Iterator[Any]:
        pad = not self._reader.training
        if batch is _END and pad:
            raise RuntimeError(
                "The IterableDataset of this rank gave no batch to pad with. Give every rank at least one batch."
            )
        count, last = 0, batch
        work, flags = self._exchange(int(batch is not _END))
        while True:
            work.wait()
            if not flags[int(pad)].item():
                break
            if batch is _END:
                self._real = min(self._real, count)
            else:
                last = batch
            count += 1
            batch = next(batches, _END)
            work, flags = self._exchange(int(batch is not _END))
            yield last
        if not pad and flags[1].item():
            rank_zero_warn(
                f"The epoch ended after {count} batches because one rank's IterableDataset ran out of data while "
                "another still had some, which is not used. Give all ranks the same number of batches."
            )

    def _exchange(self, *numbers: int) -> tuple[Any, torch.Tensor]:
        """Start to compute the minimum over ranks of each number and of its negative."""
        flags = torch.tensor([sign * number for number in numbers for sign in (1, -1)])
        return dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=self._group, async_op=True), flags

    # ---- streams that are equal on all ranks ----------------------------------------------------------------------

    def _is_same(self, batch: Any) -> bool:
        """Return whether all ranks read an equal first batch; a collective."""
        has = batch is not _END
        work, flags = self._exchange(int(has), batch_digest(batch) if has else 0)
        work.wait()
        return _agree(flags) and bool(flags[0])

    def _check_dealt(self) -> None:
        reader, dataset = self._reader, type(getattr(innermost(self.loader), "dataset", self.loader)).__name__
        if reader.training and (state_source(innermost(self.loader)) or sized_len(self.loader) is not None):
            known = "keeps its place in a state_dict" if sized_len(self.loader) is None else "has a length (__len__)"
            raise ValueError(
                f"The training stream {dataset} gives all {reader.data_ranks} data ranks the same samples, so each "
                f"would be used {reader.data_ranks} times. As it {known}, it cannot be dealt as it is. {_INSTEAD}"
            )
        rank_zero_info(
            f"The stream {dataset} is equal on all {reader.data_ranks} data ranks: each reads all of it and keeps one "
            f"batch in {reader.data_ranks}. To read less, split it by trainer.strategy.ranks.data_rank."
        )

    def _read_dealt(self, batches: Iterator[Any]) -> Iterator[Any]:
        step, index = self._read_step(batches), self._first
        work, flags = self._exchange(step.count, step.digest)
        while True:
            work.wait()
            if not _agree(flags):
                raise RuntimeError(
                    "The stream gave all data ranks the same first batch, but different ones later: it uses random "
                    "generators that differ between ranks, or its order changes. Seed it only by the epoch, on every "
                    f"rank. {_INSTEAD}"
                )
            if not step.count:
                return
            following = self._read_step(batches) if len(step.batches) == self._reader.waves else _Step()
            work, flags = self._exchange(following.count, following.digest)
            for batch, tag in step.batches:
                self._tag(index, tag, self._reader.waves)
                index += 1
                yield batch
            step = following

    def _read_step(self, batches: Iterator[Any]) -> _Step:
        reader, step = self._reader, _Step()
        sizes: list[list[int]] = []
        kept: list[Any] = []
        for batch in batches:
            wave, place = divmod(step.count, reader.data_ranks)
            step.count += 1
            step.digest = batch_digest(batch, step.digest)
            if place == 0:
                sizes.append([])
                kept.append(batch)  # padding if this rank has none of its own
            elif place == reader.data_rank:
                kept[wave] = batch
            sizes[wave].append(self._size(batch))
            if step.count == reader.waves * reader.data_ranks:
                break
        else:
            if reader.drop_last:
                return _Step()
        total = sum(map(sum, sizes))
        for batch, own in zip(kept, sizes, strict=True):
            mine = own[reader.data_rank] if reader.data_rank < len(own) else 0
            step.batches.append((batch, Tag(mine, sum(own), total)))
        return step

    def _size(self, batch: Any) -> int:
        try:
            return int(extract_batch_size(batch))
        except Exception:  # no tensor in it
            return int(getattr(self.loader, "batch_size", None) or 1)


def _agree(flags: torch.Tensor) -> bool:
    least, greatest = flags[::2], -flags[1::2]
    return torch.equal(least, greatest)


@contextmanager
def _as_data_rank(reader: Reader) -> Iterator[None]:
    """Let data sets that split by rank and world size split by data ranks, as other ranks share their samples."""
    if reader.data_ranks == reader.world_size:
        yield
        return
    names = {"RANK": str(reader.data_rank), "WORLD_SIZE": str(reader.data_ranks)}
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {name: names[name] for name in names if name in os.environ}))
        if dist.is_initialized():
            for name, value in (("get_rank", reader.data_rank), ("get_world_size", reader.data_ranks)):
                stack.enter_context(patch.object(dist, name, _returning(getattr(dist, name), value)))
        yield


def _returning(usual: Callable[..., int], value: int) -> Callable[..., int]:
    thread = threading.get_ident()

    def answer(group: Any = None) -> int:
        is_world = group is None or group is dist.group.WORLD
        return value if is_world and threading.get_ident() == thread else usual(group)

    return answer
