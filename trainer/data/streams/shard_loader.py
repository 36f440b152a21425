"""The loader of a stream of shards: ranks that have read all of theirs pad until the others have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from trainwright.trainer.data.data_order import Resumed
from trainwright.trainer.data.streams.loader import StreamLoader, Tag
from trainwright.trainer.data.streams.pieces import Pieces, ShardPiece
from trainwright.trainer.data.streams.sharded import Batch, RankProgress, ShardBatches, ShardedStream

_Batch = tuple[Any, Batch]


class ShardLoader(StreamLoader):
    """The loader of a :class:`ShardedStream` on one data rank.

    Ranks may have unequal numbers of batches. So each reads one optimizer step ahead, and all sum their samples while
    the current step runs. A rank without a batch repeats its last one as padding, until none has any.

    Args:
        loader: the user's loader over the stream.
        data_rank: this rank.
        data_ranks: number of ranks.
        seed: seed of the run.
        agreement: a gloo group of all ranks, not used for training; ``None``: a single rank.
        group: waves per optimizer step; 1 if undefined, 0 outside of training.
    """

    is_dealt = False  # ranks read consecutive parts of the stream

    def __init__(
        self,
        loader: DataLoader[Any],
        data_rank: int,
        data_ranks: int,
        seed: int,
        agreement: dist.ProcessGroup | None,
        group: int,
    ) -> None:
        stream, micro = loader.dataset, loader.batch_size
        assert isinstance(stream, ShardedStream)
        assert micro is not None
        self._batches = ShardBatches(stream, micro, data_rank, data_ranks)
        super().__init__(loader, self._batches, data_ranks, group)
        self._stream, self._micro, self._rank, self._seed, self._agreement = stream, micro, data_rank, seed, agreement
        self._collate, self._drop_last = loader.collate_fn, loader.drop_last
        # What was read of the epoch: before it was dealt as it is now; by this rank since then, in earlier runs; in the
        # remembered batches; and up to these.
        self._before: list[ShardPiece] = []
        self._resumed_progress = RankProgress()
        self._read: dict[int, Batch] = {}
        self._progress = RankProgress()

    @property
    def seed(self) -> int | None:
        """Seed of the order; ``None`` if it is not shuffled."""
        return self._seed if self._stream.shuffle else None

    def set_epoch(self, epoch: int) -> None:
        """See :class:`StreamLoader`."""
        if epoch != self.epoch:
            super().set_epoch(epoch)
            self._reset()

    def resume(
        self, resumed: Resumed, position: Mapping[str, Any] | None = None, states: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """See :class:`StreamLoader`.

        Args:
            resumed: position at which the epoch resumes.
            position: a :meth:`position` of the saved run, without its ``state``.
            states: the ``state`` of each data rank of that run.
        """
        super().resume(resumed)
        progress = [RankProgress.from_json(state) for state in states]
        read = Pieces((position or {}).get("read", ()))
        same = (position or {}).get("dealt") == self._dealt
        for each in () if same else progress:
            read.add(each.read)
        self._before = list(read)
        self._resumed_progress = progress[self._rank] if same else RankProgress()
        self._batches.resume(resumed.epoch, self._before, self._resumed_progress)
        self._reset()

    @property
    def _dealt(self) -> list[Any]:
        """Values that the assignment of samples depends on."""
        return [self.data_ranks, self.loader.num_workers, self._micro, self._stream._fingerprint]

    def _reset(self) -> None:
        self._read = {}
        self._progress = self._resumed_progress.copy() if self._is_resumed else RankProgress()

    @property
    def _is_resumed(self) -> bool:
        return self._of_this_epoch is self._resumed

    def _begin(self) -> None:
        super()._begin()
        self._reset()
        seed = self._of_this_epoch.seed
        self._batches.prepare(self.epoch, self._seed if seed is None else seed)

    def _own(self) -> Iterator[_Batch]:
        """Yield the micro-batches of this rank, until no worker has any."""
        idle, workers = 0, max(self.loader.num_workers, 1)
        for samples, beside in self.loader:
            batch = Batch(*beside)
            idle = 0 if batch.samples else idle + 1
            if batch.samples:
                yield samples, batch
            elif idle == workers:
                return

    def _tagged(self) -> Iterator[tuple[Any, Tag, Any]]:
        batches = self._own()
        last, step = None, list(islice(batches, self.group))
        pending = self._sum_waves(step)
        while True:
            waves = self._wait(pending)
            total = sum(waves)
            if not total or (self._drop_last and total < self.group * self._micro * self.data_ranks):
                return
            following = list(islice(batches, self.group))
            pending = self._sum_waves(following)
            for wave, samples in enumerate(waves):
                if wave < len(step):
                    last, batch = step[wave]
                    yield last, Tag(batch.samples, samples, total), batch
                else:
                    last = self._padding() if last is None else last
                    yield last, Tag(0, samples, total), None
            step = following

    def _sum_waves(self, step: list[_Batch]) -> tuple[Any, torch.Tensor]:
        """Start to sum the samples of all ranks in each wave of an optimizer step."""
        counts = [batch.samples for _, batch in step]
        numbers = torch.tensor(counts + [0] * (self.group - len(counts)))
        group = self._agreement
        return None if group is None else dist.all_reduce(numbers, group=group, async_op=True), numbers

    def _wait(self, pending: tuple[Any, torch.Tensor]) -> list[int]:
        work, numbers = pending
        if work is not None:
            work.wait()
            numbers //= dist.get_world_size(self._agreement) // self.data_ranks  # some ranks share samples
        return [count for count in numbers.tolist() if count]

    def _padding(self) -> Any:
        """Return a batch of one sample, for a rank that has read none of its own."""
        shards = self._stream.shards
        return self._collate([next(sample for shard in range(len(shards.sizes)) for sample in shards.read(shard, 0))])

    def _remember(self, index: int, read: Batch | None) -> None:
        if read is not None:
            self._read[index] = read
        old = self._read.pop(index - self.group - self._REMEMBERED, None)
        if old is not None:
            self._progress.add(old)

    def position(self, batches: int) -> dict[str, Any]:
        """Return how the epoch is dealt, what was read of it before, and as ``state`` this rank's progress since."""
        progress = self._progress.copy()
        for index, batch in sorted(self._read.items()):
            if index < batches:
                progress.add(batch)
        before = self._before if self._is_resumed else []
        return {"read": Pieces(before).to_json(), "dealt": self._dealt, "state": progress.to_json()}
