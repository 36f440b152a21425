"""Data of fuzzed programs: samples with ids, some of whose targets do not count, and loaders over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler
from torch.utils.data import default_collate as collate

from tests.fuzz.losses import IGNORED
from tests.fuzz.networks import CLASSES, DIM, LENGTH, VOCABULARY


class Vectors(Dataset):
    """``{"id": (), "x": (16,), "y": ()}``; targets of some samples from ``padded_from`` on do not count."""

    def __init__(self, size: int, padded_from: int | None, dtype: torch.dtype, seed: int = 11) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, DIM, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randint(CLASSES, (size,), generator=generator)
        if padded_from is not None:
            drawn = torch.rand(size, generator=generator) < 0.6
            self.y[drawn & (torch.arange(size) >= padded_from) & (torch.arange(size) % 4 != 0)] = IGNORED

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> dict[str, Tensor]:
        return {"id": torch.as_tensor(index), "x": self.x[index], "y": self.y[index]}


class Texts(Dataset):
    """``{"id": (), "x": (T,), "y": (T,)}``; targets at the end of samples from ``padded_from`` on do not count."""

    def __init__(self, size: int, padded_from: int | None, dtype: torch.dtype, seed: int = 11) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randint(VOCABULARY, (size, LENGTH), generator=generator)
        self.y = torch.randint(CLASSES, (size, LENGTH), generator=generator)
        lengths = torch.randint(LENGTH + 1, (size,), generator=generator)
        lengths[::4] = LENGTH
        self.lengths = torch.full((size,), LENGTH)
        if padded_from is not None:
            self.lengths[padded_from:] = lengths[padded_from:]
            self.y[torch.arange(LENGTH) >= self.lengths[:, None]] = IGNORED

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> dict[str, Tensor]:
        return {"id": torch.as_tensor(index), "x": self.x[index], "y": self.y[index]}


class Stream(IterableDataset):
    """The samples of a data set, one after the other."""

    def __init__(self, samples: Dataset) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        yield from (self.samples[index] for index in range(len(self.samples)))  # type: ignore[arg-type]


class Backwards(Sampler):
    """From the last sample to the first."""

    def __init__(self, samples: Dataset) -> None:
        self.size = len(samples)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))

    def __len__(self) -> int:
        return self.size


def cut_to_longest(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate texts, without the positions at which no target counts."""
    batch = collate(samples)
    if batch["x"].ndim == 2:
        length = max(2, int((batch["y"] != IGNORED).sum(1).max()))
        batch["x"], batch["y"] = batch["x"][:, :length], batch["y"][:, :length]
    return batch


def plain(samples: Dataset, batch: int) -> Any:
    """In order."""
    return DataLoader(samples, batch_size=batch)


def dropping(samples: Dataset, batch: int) -> Any:
    """Without the incomplete last batch."""
    return DataLoader(samples, batch_size=batch, drop_last=True)


def shuffled(samples: Dataset, batch: int) -> Any:
    """In a drawn order."""
    return DataLoader(samples, batch_size=batch, shuffle=True)


def own_sampler(samples: Dataset, batch: int) -> Any:
    """With a sampler."""
    return DataLoader(samples, batch_size=batch, sampler=Backwards(samples))


def own_batch_sampler(samples: Dataset, batch: int) -> Any:
    """With a batch sampler."""
    return DataLoader(samples, batch_sampler=BatchSampler(Backwards(samples), batch, drop_last=False))


def bulk(samples: Dataset, batch: int) -> Any:
    """The data set gets lists of indices."""
    sampler = BatchSampler(SequentialSampler(samples), batch, drop_last=False)  # type: ignore[arg-type]
    return DataLoader(samples, sampler=sampler, batch_size=None)


def stream(samples: Dataset, batch: int) -> Any:
    """An iterable data set."""
    return DataLoader(Stream(samples), batch_size=batch)


def ragged(samples: Dataset, batch: int) -> Any:
    """Batches as long as their longest text."""
    return DataLoader(samples, batch_size=batch, collate_fn=cut_to_longest)


def combined(samples: Dataset, batch: int) -> Any:
    """Two loaders side by side."""
    loaders = {"a": DataLoader(samples, batch_size=batch), "b": DataLoader(samples, batch_size=batch)}
    return CombinedLoader(loaders, "min_size")
