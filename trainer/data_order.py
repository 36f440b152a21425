"""The order of samples: a function of seed and epoch alone, dealt to data ranks so that each is read once."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs, _reinstantiate_wrapped_cls
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from trainwright.trainer.batch import Waves


class EpochOrder:
    """The order in which an epoch visits its samples, the same on every rank.

    Args:
        sampler: the loader's own sampler. ``SequentialSampler`` stays sequential; a plain ``RandomSampler`` becomes a
            permutation drawn from ``seed + epoch``; any other is run on every rank under random number generators
            (torch, numpy, python) seeded by ``seed + epoch``.
        seed: seed of the run; a generator given to a ``RandomSampler`` goes before it.
    """

    def __init__(self, sampler: Iterable[int], seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.epoch = 0
        self._drawn: tuple[int, Sequence[int]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next (0 is the first)."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler) if self._is_plain else len(self.indices())  # type: ignore[arg-type]

    @property
    def _is_plain(self) -> bool:
        return isinstance(self.sampler, SequentialSampler) or _is_permutation(self.sampler)

    def indices(self) -> Sequence[int]:
        """Indices of the samples in the order of this epoch."""
        if isinstance(self.sampler, SequentialSampler):
            return range(len(self.sampler))
        if self._drawn is None or self._drawn[0] != self.epoch:
            self._drawn = (self.epoch, self._draw())
        return self._drawn[1]

    def _draw(self) -> Sequence[int]:
        if isinstance(self.sampler, RandomSampler) and _is_permutation(self.sampler):
            seed = self.seed if self.sampler.generator is None else self.sampler.generator.initial_seed()
            generator = torch.Generator().manual_seed(seed + self.epoch)
            permutation: list[int] = torch.randperm(len(self.sampler), generator=generator).tolist()
            return permutation
        drawn: list[int] = run_seeded(lambda: list(self.sampler), self.seed + self.epoch)
        return drawn


def _is_permutation(sampler: object) -> bool:
    return type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None


def run_seeded(draw: Callable[[], Any], seed: int) -> Any:
    """``draw()`` under random number generators of torch, numpy and python seeded by ``seed``, which are put back."""
    with isolate_rng(include_cuda=False):
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return draw()


class RankBatchSampler(Sampler[list[int]]):
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
    """

    def __init__(
        self, order: EpochOrder, micro_batch_size: int, data_rank: int, data_ranks: int, group: int, drop_last: bool
    ) -> None:
        self.sampler = order  # by this name Lightning finds set_epoch
        self.batch_size = micro_batch_size
        self.drop_last = drop_last
        self.data_rank = data_rank
        self.data_ranks = data_ranks
        self.group = group
        self._start = 0
        self.consumed: Callable[[], int] = lambda: 0

    @property
    def waves(self) -> Waves:
        """How the samples of the current epoch are dealt."""
        samples = len(self.sampler)
        if self.drop_last:
            samples -= samples % (self.batch_size * self.data_ranks * max(self.group, 1))
        return Waves(samples, self.batch_size, self.data_ranks, self.group)

    def __len__(self) -> int:
        return len(self.waves)

    def __iter__(self) -> Iterator[list[int]]:
        indices, waves = self.sampler.indices(), self.waves
        start, self._start = self._start, 0
        for wave in range(start, len(waves)):
            first, last = waves.share(wave, self.data_rank)
            yield list(indices[first:last]) or [indices[waves.bounds(wave)[0]]]

    @property
    def regular_waves(self) -> int:
        """Waves, from the first on, whose loss is divided by nothing but the accumulation."""
        waves = self.waves
        # The samples of a global batch that ends within the epoch are all there.
        return waves.regular if waves.group <= 1 else waves.samples // (waves.group * waves.wave_size) * waves.group

    def is_padding(self, wave: int) -> bool:
        """Whether this rank has no sample of its own in ``wave``."""
        first, last = self.waves.share(wave, self.data_rank)
        return first == last

    def loss_divisor(self, wave: int, accumulation: int, whole_step: bool) -> float:
        """What to divide this rank's mean loss by, so that the average over ranks, summed over the waves of a step, is
        the mean over samples.

        Args:
            wave: index of the wave in the epoch.
            accumulation: waves of one optimizer step.
            whole_step: mean over all samples of the optimizer step; else over those of each wave, which then all weigh
                ``1 / accumulation``, as in Lightning.

        Returns:
            ``accumulation`` for full waves; infinity for padding.
        """
        waves = self.waves
        first, last = waves.share(wave, self.data_rank)
        own, (begin, end) = last - first, waves.bounds(wave)
        if own == 0:
            return float("inf")
        total = waves.group_size(wave) if whole_step else (end - begin) * accumulation
        return total / (own * self.data_ranks)

    def state_dict(self) -> dict[str, int]:
        """Samples of the global order that the epoch has consumed, and how many all ranks read at a time."""
        waves = self.waves
        done = min(self.consumed(), len(waves))
        return {"samples": waves.bounds(done)[0] if done < len(waves) else waves.samples, "wave_size": waves.wave_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the samples already consumed, when the next iteration begins."""
        waves = self.waves
        self._start = 0 if state["samples"] >= waves.samples else state["samples"] // waves.wave_size


class DealtBatchSampler(Sampler[list[int]]):
    """The batches of a user's own batch sampler, dealt whole: in wave k, rank r reads batch ``k x ranks + r``.

    The batch sampler runs on every rank under the same seed.

    Args:
        batches: the user's batch sampler.
        seed: seed of the run.
        data_rank: this rank.
        data_ranks: number of ranks.
    """

    def __init__(self, batches: Any, seed: int, data_rank: int, data_ranks: int) -> None:
        self.batches = batches
        self.seed = seed
        self.epoch = 0
        self.data_rank = data_rank
        self.data_ranks = data_ranks
        self.sampler = self  # by this name Lightning finds set_epoch
        self._drawn: tuple[int, list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches come next; the user's sampler is told too, if it listens."""
        self.epoch = epoch
        for listener in (self.batches, getattr(self.batches, "sampler", None)):
            if callable(getattr(listener, "set_epoch", None)):
                listener.set_epoch(epoch)  # type: ignore[union-attr]

    @property
    def regular_waves(self) -> int:
        """None: the user's batches may have any size."""
        return 0

    def _all(self) -> list[list[int]]:
        if self._drawn is None or self._drawn[0] != self.epoch:
            self._drawn = (self.epoch, run_seeded(lambda: [list(b) for b in self.batches], self.seed + self.epoch))
        return self._drawn[1]

    def _wave(self, wave: int) -> list[list[int]]:
        return self._all()[wave * self.data_ranks : (wave + 1) * self.data_ranks]

    def __len__(self) -> int:
        return -(-len(self._all()) // self.data_ranks)

    def __iter__(self) -> Iterator[list[int]]:
        for wave in range(len(self)):
            batches = self._wave(wave)
            yield batches[self.data_rank] if self.data_rank < len(batches) else batches[0][:1]

    def is_padding(self, wave: int) -> bool:
        """Whether this rank has no batch of its own in ``wave``."""
        return self.data_rank >= len(self._wave(wave))

    def loss_divisor(self, wave: int, accumulation: int, whole_step: bool) -> float:
        """As :meth:`RankBatchSampler.loss_divisor`; always over the samples of each wave."""
        batches = self._wave(wave)
        if self.is_padding(wave):
            return float("inf")
        return sum(map(len, batches)) * accumulation / (len(batches[self.data_rank]) * self.data_ranks)


OrderedSampler = RankBatchSampler | DealtBatchSampler


def ordered_sampler(loader: object) -> OrderedSampler | None:
    """The sampler of this module that ``loader`` uses, if any."""
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, _IndexBatchSamplerWrapper):
        sampler = sampler._batch_sampler
    return sampler if isinstance(sampler, RankBatchSampler | DealtBatchSampler) else None


def can_order(loader: object) -> bool:
    """Whether ``loader`` reads a map-style data set whose order we decide.

    A loader with a ``DistributedSampler`` of its own, without batches, or over an ``IterableDataset`` stays as it is.
    """
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and not isinstance(loader.sampler, DistributedSampler)
        and not isinstance(getattr(loader.batch_sampler, "sampler", None), DistributedSampler)
    )


def has_plain_batches(loader: DataLoader[Any]) -> bool:
    """Whether ``loader`` cuts batches of one size, not by a batch sampler of the user's own."""
    return type(loader.batch_sampler) is BatchSampler or isinstance(loader.batch_sampler, RankBatchSampler)


def replace_batches(loader: DataLoader[Any], batches: OrderedSampler, stage: RunningStage) -> DataLoader[Any]:
    """A copy of ``loader`` (of its own class, with its own arguments) that reads ``batches``."""
    held = loader.__dict__["batch_sampler"]
    # Lightning would insist on rebuilding a user's batch sampler around another sampler; we replace it as a whole.
    loader.__dict__["batch_sampler"] = BatchSampler(SequentialSampler(range(1)), 1, False)
    try:
        args, kwargs = _get_dataloader_init_args_and_kwargs(loader, loader.sampler)
    finally:
        loader.__dict__["batch_sampler"] = held
    # Positional arguments by name: a positional batch_size would contradict batch_sampler.
    kwargs = {**dict(zip(getattr(loader, "__pl_saved_arg_names", ()), args, strict=False)), **kwargs}
    wrapped = _IndexBatchSamplerWrapper(batches) if stage == RunningStage.PREDICTING else batches
    kwargs.update(batch_sampler=wrapped, batch_size=1, shuffle=False, sampler=None, drop_last=False)
    return _reinstantiate_wrapped_cls(loader, **kwargs)  # type: ignore[no-any-return]


def seed_of_run() -> int:
    """Seed set by ``seed_everything``; 0 when there is none."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))
