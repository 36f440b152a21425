"""A user's sampler of batches, or of what a loader without batches reads at a time, dealt to data ranks whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from trainwright.trainer.data.data_order import DealingSampler, Resumed
from trainwright.trainer.data.epoch_order import run_seeded


class DealtBatchSampler(DealingSampler):
    """The batches of a user's sampler: in wave k, rank r reads batch ``k x ranks + r``.

    The sampler runs on every rank with the same seed.

    Args:
        batches: the user's batch sampler; or the sampler of a loader with ``batch_size=None``, which yields lists of
            indices, or single ones, which count as a batch of one sample.
        seed: seed of the run.
        data_rank: this rank.
        data_ranks: number of ranks.
        kind: copies what ``batches`` yields; batches are lists.
    """

    def __init__(
        self, batches: Any, seed: int, data_rank: int, data_ranks: int, kind: Callable[[Any], Any] = list
    ) -> None:
        super().__init__(data_rank, data_ranks)
        self.batches, self.kind = batches, kind
        self.seed = seed
        self.epoch = 0
        self.sampler = self  # Lightning finds set_epoch by this name
        self._drawn: tuple[tuple[int, int], list[list[int]]] | None = None
        self._dealt: tuple[Any, WholeBatches] | None = None

    @property
    def current_epoch(self) -> int:
        """See :class:`DealingSampler`."""
        return self.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, in the user's sampler too if it supports that."""
        self.epoch = epoch
        for listener in (self.batches, getattr(self.batches, "sampler", None)):
            if callable(getattr(listener, "set_epoch", None)):
                listener.set_epoch(epoch)  # type: ignore[union-attr]

    regular_waves = 0  # the user's batches may have any size
    whole_step = False  # only if a global batch is set

    @property
    def _batches(self) -> int:
        return len(self._all())

    def _all(self) -> list[list[int]]:
        resumed = self._of_this_epoch
        seed = self.seed if resumed is None or resumed.seed is None else resumed.seed
        if self._drawn is None or self._drawn[0] != (self.epoch, seed):
            drawn = run_seeded(lambda: [self.kind(b) for b in self.batches], seed + self.epoch)
            self._drawn = ((self.epoch, seed), drawn)
        return self._drawn[1]

    def _deal(self, resumed: Resumed | None, draw: bool = False) -> WholeBatches:
        key = (self.epoch, resumed)
        if self._dealt is None or self._dealt[0] != key:
            batches = self._all()
            start = 0 if resumed is None else _batches_of(batches, resumed.samples)
            self._dealt = (key, WholeBatches(batches, start, self.data_ranks))
        return self._dealt[1]

    def _reader(self, dealing: WholeBatches) -> Callable[[int], list[int]]:
        def read(wave: int) -> list[int]:
            batches = dealing.wave(wave)
            if self.data_rank < len(batches):
                return batches[self.data_rank]
            return batches[0][:1] if isinstance(batches[0], list) else batches[0]

        return read

    def _position(self, dealing: WholeBatches, waves: int, before: Resumed | None) -> dict[str, Any]:
        return {"samples": dealing.samples(waves), "history": []}

    def is_padding(self, batch_idx: int) -> bool:
        """Return whether this rank has no batch of its own in the ``batch_idx``-th wave of the epoch."""
        return self.data_rank >= len(self.dealing.wave(batch_idx - self.first_batch))

    def loss_divisor(self, batch_idx: int, accumulation: int, whole_step: bool) -> float:
        """See :meth:`RankBatchSampler.loss_divisor`."""
        dealing: WholeBatches = self.dealing
        wave = batch_idx - self.first_batch
        batches = dealing.wave(wave)
        if self.data_rank >= len(batches):
            return float("inf")
        own, total = _size(batches[self.data_rank]), sum(map(_size, batches)) * accumulation
        if whole_step:
            total = sum(map(_size, dealing.wave(wave - wave % accumulation, accumulation)))
        return total / (own * self.data_ranks)


class WholeBatches:
    """Batches from the ``start``-th on, in waves."""

    def __init__(self, batches: list[list[int]], start: int, data_ranks: int) -> None:
        self._batches = batches
        self._start = start
        self._ranks = data_ranks

    def __len__(self) -> int:
        return -(-(len(self._batches) - self._start) // self._ranks)

    def wave(self, wave: int, waves: int = 1) -> list[list[int]]:
        """Return the batches that all ranks read at the same time, or in several waves."""
        first = self._start + wave * self._ranks
        return self._batches[first : first + waves * self._ranks]

    def samples(self, waves: int) -> int:
        """Return the samples of the epoch read after so many waves."""
        return sum(map(_size, self._batches[: self._start + waves * self._ranks]))


def _size(batch: Any) -> int:
    """Return the number of samples: an index that is no list or array is one, whatever the data set returns for it."""
    return len(batch) if isinstance(batch, list) or getattr(batch, "ndim", 0) > 0 else 1


def _batches_of(batches: list[list[int]], samples: int) -> int:
    """Return how many batches, from the first on, hold so many samples."""
    sums = list(itertools.accumulate(map(_size, batches), initial=0))
    if samples >= sums[-1]:
        return len(batches)
    if samples in sums:
        return sums.index(samples)
    after = next(i for i, total in enumerate(sums) if total > samples)
    raise ValueError(
        f"The checkpoint had read {samples} samples of this epoch, but the batch sampler now ends batches after "
        f"{sums[after - 1]} and {sums[after]} samples. Give it the batch size of the saved run, or one that divides it."
    )
