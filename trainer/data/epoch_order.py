"""Order of the samples of an epoch: a function of seed and epoch only."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import RandomSampler, SequentialSampler


class EpochOrder:
    """Order of the samples of an epoch, equal on every rank.

    Args:
        sampler: the loader's own sampler. ``SequentialSampler`` stays sequential; a plain ``RandomSampler`` becomes a
            permutation drawn from ``seed + epoch``; any other runs on every rank with random number generators (torch,
            numpy, python) seeded by ``seed + epoch``.
        seed: seed of the run; a generator passed to the sampler takes precedence.
    """

    def __init__(self, sampler: Iterable[int], seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.epoch = 0
        self._set: int | None = None  # epoch last set in the user's sampler
        self._drawn: tuple[int, Sequence[int]] | None = None
        self._seed_of: dict[int, int] = {}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (from 0), in the user's sampler too if it supports that."""
        self.epoch = epoch
        listener = getattr(self.sampler, "set_epoch", None)
        if callable(listener) and epoch != self._set:
            listener(epoch)
            self._set = epoch

    @property
    def order_seed(self) -> int | None:
        """Seed of this order; ``None`` if it is not shuffled."""
        if isinstance(self.sampler, SequentialSampler):
            return None
        return self.seed if self._generator is None else self._generator.initial_seed()

    @property
    def _generator(self) -> torch.Generator | None:
        generator = getattr(self.sampler, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def use_seed(self, epoch: int, seed: int | None) -> None:
        """Use another seed for one epoch; ``None`` undoes that."""
        self._seed_of = {} if seed is None else {epoch: seed}
        self._drawn = None

    def __len__(self) -> int:
        is_plain = isinstance(self.sampler, SequentialSampler) or _is_permutation(self.sampler)
        return len(self.sampler) if is_plain else len(self.indices())  # type: ignore[arg-type]

    def indices(self) -> Sequence[int]:
        """Return the indices of the samples in the order of this epoch."""
        if isinstance(self.sampler, SequentialSampler):
            return range(len(self.sampler))
        if self._drawn is None or self._drawn[0] != self.epoch:
            self._drawn = (self.epoch, self._draw())
        return self._drawn[1]

    def _draw(self) -> Sequence[int]:
        if isinstance(self.sampler, RandomSampler) and _is_permutation(self.sampler):
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            permutation: list[int] = torch.randperm(len(self.sampler), generator=generator).tolist()
            return permutation
        own = self._generator
        if own is None:
            return run_seeded(lambda: list(self.sampler), self._seed + self.epoch)  # type: ignore[no-any-return]
        # Otherwise the order would depend on how often it was drawn before.
        before = own.initial_seed()
        own.manual_seed(self._seed + self.epoch)
        try:
            return run_seeded(lambda: list(self.sampler), self._seed + self.epoch)  # type: ignore[no-any-return]
        finally:
            own.manual_seed(before)

    @property
    def _seed(self) -> int:
        seed = self.order_seed
        return self._seed_of.get(self.epoch, self.seed if seed is None else seed)


def _is_permutation(sampler: object) -> bool:
    return type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None


def run_seeded(draw: Callable[[], Any], seed: int) -> Any:
    """Return ``draw()`` with torch, numpy and python seeded by ``seed``; their states are restored."""
    with isolate_rng(include_cuda=False):
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return draw()


def seed_of_run() -> int:
    """Return the seed of ``seed_everything``; 0 without one."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))
