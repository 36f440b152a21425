"""The order in which an epoch visits its samples: a function of seed and epoch alone."""

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
    """The order in which an epoch visits its samples, the same on every rank.

    Args:
        sampler: the loader's own sampler. ``SequentialSampler`` stays sequential; a plain ``RandomSampler`` becomes a
            permutation drawn from ``seed + epoch``; any other is run on every rank under random number generators
            (torch, numpy, python) seeded by ``seed + epoch``.
        seed: seed of the run; that of a generator which the sampler was given goes before it.
    """

    def __init__(self, sampler: Iterable[int], seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.epoch = 0
        self._told: int | None = None
        self._drawn: tuple[int, Sequence[int]] | None = None
        self._seed_of: dict[int, int] = {}

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next (0 is the first); the user's sampler is told too, if it listens."""
        self.epoch = epoch
        listener = getattr(self.sampler, "set_epoch", None)
        if callable(listener) and epoch != self._told:
            listener(epoch)
            self._told = epoch

    @property
    def order_seed(self) -> int | None:
        """The seed by which this order is drawn; ``None`` if it is not shuffled."""
        if isinstance(self.sampler, SequentialSampler):
            return None
        return self.seed if self._generator is None else self._generator.initial_seed()

    @property
    def _generator(self) -> torch.Generator | None:
        generator = getattr(self.sampler, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def use_seed(self, epoch: int, seed: int | None) -> None:
        """Draw one epoch by another seed; ``None`` takes that back."""
        self._seed_of = {} if seed is None else {epoch: seed}
        self._drawn = None

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
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            permutation: list[int] = torch.randperm(len(self.sampler), generator=generator).tolist()
            return permutation
        own = self._generator
        if own is None:
            return run_seeded(lambda: list(self.sampler), self._seed + self.epoch)  # type: ignore[no-any-return]
        # Else its order would depend on how often it was drawn before.
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
    """``draw()`` under random number generators of torch, numpy and python seeded by ``seed``, which are put back."""
    with isolate_rng(include_cuda=False):
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return draw()


def seed_of_run() -> int:
    """Seed set by ``seed_everything``; 0 when there is none."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))
