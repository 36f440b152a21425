"""Samplers that deal samples to data ranks, each sample once, and resume within an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import Sampler

from trainwright.core.global_batch import Waves
from trainwright.trainer.balance.shares import PassShares, ShareSchedule
from trainwright.trainer.data.epoch_order import EpochOrder
from trainwright.trainer.data.partition import (
    Dealing,
    HashPartition,
    InOrder,
    InQueues,
    RangePartition,
    Read,
    SamplePartition,
    add_read,
    as_indices,
    remaining,
)


@dataclass(frozen=True)
class Resumed:
    """Position at which an epoch resumes.

    Args:
        epoch: the epoch.
        first_batch: index in the epoch, as the loop counts, of the first batch to deal.
        samples: samples read of the present pass over the data.
        history: how they were read.
        passes: earlier complete passes in this epoch (loaders that are cycled beside a longer one).
        seed: seed of the order of this epoch; ``None``: the sampler's own.
    """

    epoch: int
    first_batch: int
    samples: int
    history: tuple[Read, ...] = ()
    passes: int = 0
    seed: int | None = None


class Drawn(NamedTuple):
    """A sample of one epoch."""

    epoch: int
    index: Any


class DealingSampler(Sampler[list[int]]):
    """Base of samplers that deal to data ranks: passes over the data, and resuming within one.

    Args:
        data_rank: this rank.
        data_ranks: number of ranks.

    Attributes:
        drawn: batches of the present epoch drawn so far, including those before :attr:`first_batch`.
    """

    # Yield a `Drawn` per sample, for a data set whose samples depend on the epoch.
    with_epoch = False
    # Whether its length is the number of batches in one process, rather than of this rank, as for an evaluation.
    evaluates = False
    is_dealt = True
    # Returns the batches of the present epoch that have reached the loop.
    consumed: Callable[[], int]

    def __init__(self, data_rank: int, data_ranks: int) -> None:
        self.data_rank = data_rank
        self.data_ranks = data_ranks
        self.consumed = int  # 0
        self.drawn = 0
        self._resumed: Resumed | None = None
        self._passed: tuple[int, int] = (0, 0)  # epoch, passes started in it

    @property
    def current_epoch(self) -> int:
        """The epoch whose samples come next, counted from 0."""
        raise NotImplementedError

    def _deal(self, resumed: Resumed | None, draw: bool = False) -> Any:
        """Return the dealing of a whole pass, or the rest of one; with indices only if ``draw``."""
        raise NotImplementedError

    def _position(self, dealing: Any, waves: int, before: Resumed | None) -> dict[str, Any]:
        raise NotImplementedError

    def _reader(self, dealing: Any) -> Callable[[int], list[int]]:
        """Return a function from a wave to the indices that this rank reads in it."""
        raise NotImplementedError

    @property
    def _batches(self) -> int:
        """Batches of a pass in one process."""
        raise NotImplementedError

    @property
    def _of_this_epoch(self) -> Resumed | None:
        resumed = self._resumed
        return resumed if resumed is not None and resumed.epoch == self.current_epoch else None

    @property
    def first_batch(self) -> int:
        """Index in the epoch of the first batch dealt now: 0, unless another run has started the epoch."""
        resumed = self._of_this_epoch
        return 0 if resumed is None else resumed.first_batch

    @property
    def dealing(self) -> Any:
        """The dealing of the present epoch from :attr:`first_batch` on."""
        return self._deal(self._of_this_epoch)

    def __len__(self) -> int:
        if self.evaluates:
            return self._batches
        resumed = self._of_this_epoch
        if resumed is not None and resumed.passes:
            # A cycled loader must not make the epoch longer than the longest one.
            return min(resumed.first_batch, len(self._deal(None)))
        return self.first_batch + len(self.dealing)

    def __iter__(self) -> Iterator[list[int]]:
        # A DataLoader with workers creates two iterators and reads one: a pass starts with its first batch.
        epoch = self.current_epoch
        passed = self._passed[1] if self._passed[0] == epoch else 0
        self._passed = (epoch, passed + 1)
        resumed = None if passed else self._of_this_epoch
        dealing = self._deal(resumed, draw=True)
        first = 0 if resumed is None else resumed.first_batch
        read = self._reader(dealing)
        for wave in range(len(dealing)):
            batch = read(wave)
            self.drawn = first + wave + 1
            yield [Drawn(epoch, index) for index in batch] if self.with_epoch else batch  # type: ignore[misc]

    def resume(self, resumed: Resumed) -> None:
        """Resume within an epoch at its next iteration."""
        self._resumed = resumed
        self._passed = (resumed.epoch, 0)

    def position(self, batches: int) -> dict[str, Any]:
        """Return what has been read once the loop has used so many batches of the epoch, :attr:`first_batch` included.

        Returns:
            ``samples`` of the present pass, ``history`` (how they were read), and ``passes``, earlier complete passes.
        """
        resumed, waves = self._of_this_epoch, batches - self.first_batch
        passes, dealing = 0 if resumed is None else resumed.passes, self.dealing
        if waves > len(dealing):
            waves -= len(dealing)
            resumed, dealing = None, self._deal(None)
            more, waves = divmod(waves, max(len(dealing), 1))
            if more and not waves:
                more, waves = more - 1, len(dealing)
            passes += more + 1
        return {**self._position(dealing, waves, resumed), "passes": passes}

    def state_dict(self) -> dict[str, Any]:
        """Return :meth:`position` of what has reached the loop. By this Lightning knows that the loader can resume."""
        return self.position(self.consumed())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the position of a :meth:`state_dict` at the next iteration."""
        history = tuple(Read.from_json(entry) for entry in state.get("history", ()))
        self.resume(Resumed(self.current_epoch, 0, state["samples"], history, state.get("passes", 0)))


class RankBatchSampler(DealingSampler):
    """The batches of one data rank: its part of every wave.

    A rank without a sample in a wave reads one of another rank's to match collectives; such a batch is *padding*
    (:meth:`is_padding`) and must have no weight.

    Args:
        order: the order of samples.
        micro_batch_size: samples per rank and wave.
        data_rank: this rank.
        data_ranks: number of ranks.
        group: waves per global batch; 1 if undefined, 0 outside of training.
        drop_last: leave out an incomplete last wave, or global batch.
        partition: of samples; ``None`` interleaves.
        step_samples: samples of a global batch whose last wave is smaller; 0: all waves are full.
        shares: of ranks in a wave; ``None``: equal. Only without ``partition``.
    """

    def __init__(
        self,
        order: EpochOrder,
        micro_batch_size: int,
        data_rank: int,
        data_ranks: int,
        group: int,
        drop_last: bool,
        partition: SamplePartition | None = None,
        step_samples: int = 0,
        shares: ShareSchedule | None = None,
    ) -> None:
        super().__init__(data_rank, data_ranks)
        self.sampler = order  # Lightning finds set_epoch by this name
        self.batch_size = micro_batch_size
        self.drop_last = drop_last
        self.group = group
        self.partition = partition
        self.step_samples = step_samples
        self.shares = shares
        # Returns partitions of earlier parts of an epoch too.
        self.partition_named: Callable[[str], SamplePartition] = self._known_partition
        self._dealt: tuple[Any, Dealing] | None = None

    @property
    def current_epoch(self) -> int:
        """See :class:`DealingSampler`."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; Lightning finds this one where a loader has no batch sampler."""
        self.sampler.set_epoch(epoch)

    @property
    def _batches(self) -> int:
        return -(-self._deal(None).waves.samples // self.batch_size)  # type: ignore[union-attr]

    @property
    def whole_step(self) -> bool:
        """True if losses are weighted over whole optimizer steps, as ranks read unequal numbers of samples."""
        return self.partition is not None

    def resume(self, resumed: Resumed) -> None:
        """See :class:`DealingSampler`; the epoch keeps its original order."""
        super().resume(resumed)
        self._dealt = None
        self.sampler.use_seed(resumed.epoch, resumed.seed)

    def _deal(self, resumed: Resumed | None, draw: bool = False) -> Dealing:
        if self.partition is None and not (resumed is not None and resumed.history):
            samples = len(self.sampler)
            start = 0 if resumed is None else min(resumed.samples, samples)
            # Only lengths matter yet; drawing the order would be wasted.
            return self._in_order(self.sampler.indices() if draw else (), start, samples, resumed)
        key = (self.sampler.epoch, resumed)
        if self._dealt is None or self._dealt[0] != key:
            self._dealt = (key, self._deal_rest(resumed))
        return self._dealt[1]

    def _known_partition(self, name: str) -> SamplePartition:
        if self.partition is not None and self.partition.name == name:
            return self.partition
        return RangePartition() if name == "range" else HashPartition()

    def _deal_rest(self, resumed: Resumed | None) -> Dealing:
        indices, start = self.sampler.indices(), 0
        if resumed is not None and resumed.history:
            indices, start = remaining(indices, resumed.history, self.partition_named)
        elif resumed is not None:
            start = min(resumed.samples, len(indices))
        if self.partition is None:
            return self._in_order(indices, start, len(indices), resumed)
        rest = as_indices(indices[start:], self.partition.name)
        return InQueues(rest, self.partition, self.data_ranks, self.batch_size, self.group, self.drop_last)

    def _in_order(self, indices: Sequence[int], start: int, total: int, resumed: Resumed | None) -> InOrder:
        samples = total - start
        if self.drop_last:
            samples -= samples % (self.step_samples or self.batch_size * (self.data_ranks * self.group or 1))
        waves = Waves(samples, self.batch_size, self.data_ranks, self.group, self.step_samples)
        if self.shares is None:
            return InOrder(indices, start, waves)
        first = 0 if resumed is None else resumed.first_batch
        return InOrder(indices, start, waves, PassShares(self.shares, self.sampler.epoch, first))

    def _reader(self, dealing: Dealing) -> Callable[[int], list[int]]:
        return partial(dealing.batch, rank=self.data_rank)

    def _position(self, dealing: Dealing, waves: int, before: Resumed | None) -> dict[str, Any]:
        read = dealing.read(waves)
        samples = sum(dealing.wave_total(wave) for wave in range(waves)) if read.waves else read.samples
        if before is None:
            history: tuple[Read, ...] = ()
        else:
            samples += before.samples
            history = before.history or add_read((), Read("interleave", before.samples))
        history = add_read(history, read)
        plain = all(entry.partition == "interleave" for entry in history)
        return {"samples": samples, "history": [] if plain else [entry.to_json() for entry in history]}

    @property
    def regular_waves(self) -> int:
        """Batches, from the start of the epoch, whose loss is divided only by the accumulation."""
        dealing: Dealing = self.dealing
        return self.first_batch + dealing.regular

    def is_padding(self, batch_idx: int) -> bool:
        """Return whether this rank has no sample of its own in the ``batch_idx``-th batch of the epoch."""
        return self.count(batch_idx) == 0

    def count(self, batch_idx: int) -> int:
        """Return this rank's own samples in the ``batch_idx``-th batch of the epoch."""
        dealing: Dealing = self.dealing
        return dealing.count(batch_idx - self.first_batch, self.data_rank)

    def loss_divisor(self, batch_idx: int, accumulation: int, whole_step: bool) -> float:
        """Return the divisor of this rank's mean loss, such that the average over ranks, summed over the waves of a
        step, is the mean over samples.

        Args:
            batch_idx: index of the wave in the epoch.
            accumulation: waves per optimizer step.
            whole_step: take the mean over all samples of the optimizer step; else over those of each wave, which then
                all have weight ``1 / accumulation``, as in Lightning.

        Returns:
            ``accumulation`` for full waves; infinity for padding.
        """
        dealing: Dealing = self.dealing
        wave = batch_idx - self.first_batch
        own = dealing.count(wave, self.data_rank)
        if own == 0:
            return float("inf")
        total = dealing.step_total(wave) if whole_step else dealing.wave_total(wave) * accumulation
        return total / (own * self.data_ranks)
