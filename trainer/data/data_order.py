"""Samples dealt to data ranks so that each is read once, and going on within an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import Sampler

from trainwright.core.global_batch import Waves
from trainwright.trainer.balance.shares import ShareSchedule, SharesFrom
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
    what_is_left,
)


@dataclass(frozen=True)
class Resumed:
    """Where an epoch goes on that was begun before.

    Args:
        epoch: the epoch.
        first_batch: index in the epoch, as the loop counts, of the first batch that is dealt anew.
        samples: samples of the present pass over the data that have been read.
        history: how they were read.
        passes: whole passes over the data before, in this epoch (loaders that are cycled beside a longer one).
        seed: seed of the order of this epoch; ``None`` takes the sampler's own.
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
    """What samplers that deal to data ranks have in common: passes over the data, and resuming within one.

    Args:
        data_rank: this rank.
        data_ranks: number of ranks.
    """

    # Yield a `Drawn` for each sample, for a data set that draws by the epoch too.
    with_epoch = False
    # Batches of the present epoch that reached the loop.
    consumed: Callable[[], int]

    def __init__(self, data_rank: int, data_ranks: int) -> None:
        self.data_rank = data_rank
        self.data_ranks = data_ranks
        self.consumed = lambda: 0
        self.drawn = 0
        """Batches of the present epoch that have been drawn, those before :attr:`first_batch` included."""
        self._resumed: Resumed | None = None
        self._passed: tuple[int, int] = (0, 0)  # epoch, passes begun in it

    @property
    def current_epoch(self) -> int:
        """The epoch whose samples come next (0 is the first)."""
        raise NotImplementedError

    def _deal(self, resumed: Resumed | None, draw: bool = False) -> Any:
        """A whole pass over the data, or what is left of one; with its indices only if ``draw``."""
        raise NotImplementedError

    def _position(self, dealing: Any, waves: int, before: Resumed | None) -> dict[str, Any]:
        raise NotImplementedError

    def _batch(self, dealing: Any, wave: int) -> list[int]:
        raise NotImplementedError

    @property
    def _of_this_epoch(self) -> Resumed | None:
        resumed = self._resumed
        return resumed if resumed is not None and resumed.epoch == self.current_epoch else None

    @property
    def first_batch(self) -> int:
        """Index in the epoch of the first batch that is dealt now: 0, unless the epoch was begun in another run."""
        resumed = self._of_this_epoch
        return 0 if resumed is None else resumed.first_batch

    @property
    def dealing(self) -> Any:
        """How the present epoch is dealt from :attr:`first_batch` on."""
        return self._deal(self._of_this_epoch)

    def __len__(self) -> int:
        resumed = self._of_this_epoch
        if resumed is not None and resumed.passes:
            # A loader that is cycled must not make the epoch longer than the one beside which it is.
            return min(resumed.first_batch, len(self._deal(None)))
        return self.first_batch + len(self.dealing)

    def __iter__(self) -> Iterator[list[int]]:
        # A DataLoader with workers makes two iterators and reads one: a pass begins when the first batch is asked for.
        epoch = self.current_epoch
        passed = self._passed[1] if self._passed[0] == epoch else 0
        self._passed = (epoch, passed + 1)
        resumed = None if passed else self._of_this_epoch
        dealing = self._deal(resumed, draw=True)
        first = 0 if resumed is None else resumed.first_batch
        for wave in range(len(dealing)):
            batch = self._batch(dealing, wave)
            self.drawn = first + wave + 1
            yield [Drawn(epoch, index) for index in batch] if self.with_epoch else batch  # type: ignore[misc]

    def resume(self, resumed: Resumed) -> None:
        """Go on within an epoch when the next iteration of it begins."""
        self._resumed = resumed
        self._passed = (resumed.epoch, 0)

    def position(self, batches: int) -> dict[str, Any]:
        """What has been read when the loop has used so many batches of the epoch, :attr:`first_batch` included.

        Returns:
            ``samples`` of the present pass and ``history``, how they were read; ``passes``, whole passes before it.
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
        """:meth:`position` of what has reached the loop. By this Lightning knows that the loader can be resumed."""
        return self.position(self.consumed())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after what a :meth:`state_dict` has read, when the next iteration begins."""
        history = tuple(Read.from_json(entry) for entry in state.get("history", ()))
        self.resume(Resumed(self.current_epoch, 0, state["samples"], history, state.get("passes", 0)))


class RankBatchSampler(DealingSampler):
    """The batches that one data rank reads: its part of every wave.

    A rank that has no sample of its own in a wave reads one of another rank's, so that it takes part in the
    collectives of the step; that batch is *padding* (:meth:`is_padding`) and must count for nothing.

    Args:
        order: the order of samples.
        micro_batch_size: samples per rank and wave.
        data_rank: this rank.
        data_ranks: number of ranks.
        group: waves of one global batch; 1 if none is defined, 0 outside of training.
        drop_last: leave out the last wave, or the last global batch, if it is not full.
        partition: whose is what; ``None`` interleaves.
        step_samples: samples of a global batch whose last wave is smaller than the others; 0: all waves are full.
        shares: which rank gets how much of a wave; ``None``: all the same. Without ``partition`` only.
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
        self.sampler = order  # by this name Lightning finds set_epoch
        self.batch_size = micro_batch_size
        self.drop_last = drop_last
        self.group = group
        self.partition = partition
        self.step_samples = step_samples
        self.shares = shares
        # Knows the partitions of older parts of an epoch, too.
        self.partition_named: Callable[[str], SamplePartition] = self._known_partition
        self._dealt: tuple[Any, Dealing] | None = None

    @property
    def current_epoch(self) -> int:
        """See :class:`DealingSampler`."""
        return self.sampler.epoch

    @property
    def whole_step(self) -> bool:
        """Whether losses must be weighed over whole optimizer steps, since ranks read unequal numbers."""
        return self.partition is not None

    @property
    def waves(self) -> Waves:
        """How the samples of the current epoch are dealt, if they are interleaved."""
        dealing = self.dealing
        assert isinstance(dealing, InOrder)
        return dealing.waves

    def resume(self, resumed: Resumed) -> None:
        """See :class:`DealingSampler`; the order of that epoch is the one it was begun in."""
        super().resume(resumed)
        self._dealt = None
        self.sampler.use_seed(resumed.epoch, resumed.seed)

    def _deal(self, resumed: Resumed | None, draw: bool = False) -> Dealing:
        if self.partition is None and not (resumed is not None and resumed.history):
            samples = len(self.sampler)
            start = 0 if resumed is None else min(resumed.samples, samples)
            # Numbers follow from lengths alone; an order that is asked for early would be drawn for nothing.
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
            indices, start = what_is_left(indices, resumed.history, self.partition_named)
        elif resumed is not None:
            start = min(resumed.samples, len(indices))
        if self.partition is None:
            return self._in_order(indices, start, len(indices), resumed)
        rest = as_indices(indices[start:], self.partition.name)
        return InQueues(rest, self.partition, self.data_ranks, self.batch_size, self.group, self.drop_last)

    def _in_order(self, indices: Sequence[int], start: int, total: int, resumed: Resumed | None) -> InOrder:
        samples = total - start
        if self.drop_last:
            samples -= samples % (self.step_samples or self.batch_size * self.data_ranks * max(self.group, 1))
        waves = Waves(samples, self.batch_size, self.data_ranks, self.group, self.step_samples)
        if self.shares is None:
            return InOrder(indices, start, waves)
        first = 0 if resumed is None else resumed.first_batch
        return InOrder(indices, start, waves, SharesFrom(self.shares, self.sampler.epoch, first))

    def _batch(self, dealing: Dealing, wave: int) -> list[int]:
        return dealing.batch(wave, self.data_rank)

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
        """Batches, from the first of the epoch on, whose loss is divided by nothing but the accumulation."""
        dealing: Dealing = self.dealing
        return self.first_batch + dealing.regular

    def is_padding(self, batch_idx: int) -> bool:
        """Whether this rank has no sample of its own in the ``batch_idx``-th batch of the epoch."""
        dealing: Dealing = self.dealing
        return dealing.count(batch_idx - self.first_batch, self.data_rank) == 0

    def count(self, batch_idx: int) -> int:
        """Samples of its own that this rank has in the ``batch_idx``-th batch of the epoch."""
        dealing: Dealing = self.dealing
        return dealing.count(batch_idx - self.first_batch, self.data_rank)

    def loss_divisor(self, batch_idx: int, accumulation: int, whole_step: bool) -> float:
        """What to divide this rank's mean loss by, so that the average over ranks, summed over the waves of a step, is
        the mean over samples.

        Args:
            batch_idx: index of the wave in the epoch.
            accumulation: waves of one optimizer step.
            whole_step: mean over all samples of the optimizer step; else over those of each wave, which then all weigh
                ``1 / accumulation``, as in Lightning.

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
