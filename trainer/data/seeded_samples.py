"""Samples whose random numbers depend only on seed, epoch and index."""

from __future__ import annotations

import hashlib
import operator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from trainwright.trainer.data.data_order import DealingSampler, Drawn
from trainwright.trainer.data.epoch_order import run_seeded


class SeededSamples(Dataset[Any]):
    """Draws every sample of a data set with its own random numbers.

    Torch's, numpy's and python's global generators are seeded from (seed, epoch, index) around ``dataset[index]`` and
    restored, so an augmentation is equal under every layout, number of workers and after a resume. The epoch comes with
    the index, as a persistent worker receives nothing else. ``__getitems__`` of the data set is not used: it would draw
    several samples from one generator.

    Args:
        dataset: the user's data set; its attributes are forwarded.
        seed: seed of the run.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, drawn: Any) -> Any:
        if not isinstance(drawn, Drawn):
            return self.dataset[drawn]  # accessed by the user
        epoch, index = drawn
        return run_seeded(lambda: self.dataset[index], sample_seed(self.seed, epoch, index))

    def __getattr__(self, name: str) -> Any:
        # Names by which torch looks for other ways to read, and those that pickle and copy look for.
        if name in ("dataset", "__getitems__") or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def sample_seed(seed: int, epoch: int, index: Any) -> int:
    """Return a 63-bit seed for one sample of one epoch."""
    if hasattr(index, "__index__"):
        index = operator.index(index)  # numpy's and torch's integers have another repr
    digest = hashlib.blake2b(f"{seed} {epoch} {index!r}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_samples(loader: DataLoader[Any], sampler: DealingSampler, seed: int) -> None:
    """Let ``loader``, which reads the batches of ``sampler``, draw seeded samples."""
    sampler.with_epoch = True
    # A DataLoader refuses a new data set once it is built, and a subclass may not accept one in its constructor.
    loader.__dict__["dataset"] = SeededSamples(loader.dataset, seed)
