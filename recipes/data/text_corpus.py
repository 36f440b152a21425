"""Windows of text as a LightningDataModule."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainwright.recipes.data import corpus


class TextWindows(Dataset[Tensor]):
    """Windows of ``seq_len + 1`` bytes or tokens of a part of a memory-mapped file.

    Window i begins at ``begin + i * seq_len``, so every id but the first is predicted exactly once.

    Args:
        file: the text.
        begin: first id of the part.
        end: id after its last.
        seq_len: predicted ids per window.
        dtype: of an id in the file; ``uint8``: bytes.
    """

    def __init__(self, file: Path, begin: int, end: int, seq_len: int, dtype: str = "uint8") -> None:
        self.file = file
        self.begin = begin
        self.seq_len = seq_len
        self.dtype = dtype
        self.windows = corpus.num_windows(end - begin, seq_len)
        self._ids: np.ndarray | None = None

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> Tensor:
        """Return the ids of window ``index``, ``(seq_len + 1,)``."""
        if not 0 <= index < self.windows:
            raise IndexError(f"window {index} of {self.windows}")
        if self._ids is None:
            self._ids = np.memmap(self.file, dtype=self.dtype, mode="r")
        start = self.begin + index * self.seq_len
        return torch.from_numpy(self._ids[start : start + self.seq_len + 1].copy())

    def __getstate__(self) -> dict[str, Any]:
        # Pickling a memmap would copy the whole text into every loader process.
        return {**self.__dict__, "_ids": None}


class TextCorpus(LightningDataModule):
    """Text in windows of bytes, uint8 ``(B, seq_len + 1)``, split by position.

    The first part trains (shuffled); of the last ``held_out`` part, the first half validates, the second tests and is
    read by ``predict``. One file is mapped in place; a folder is concatenated once into a file under ``cache_dir``.

    Args:
        path: a UTF-8 text file, or a folder of them; ``None``: the source text of the running Python's standard
            library (about 11 MiB).
        seq_len: predicted bytes per window.
        batch_size: windows per micro-batch.
        held_out: part of the text for validation and test, more than 0, less than 1.
        pattern: shell-style pattern for names of a folder's files.
        cache_dir: folder of concatenated text; ``None``: ``~/.cache/trainwright/corpora``.
        num_workers: loader processes per rank; 0: the rank itself (reading mapped text is fast).

    Raises:
        ValueError: (in ``setup``) if the path is missing, empty, not text, or too short.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        seq_len: int = 128,
        batch_size: int = 16,
        held_out: float = 0.05,
        pattern: str = "*",
        cache_dir: str | os.PathLike[str] | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.path = path
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.held_out = held_out
        self.pattern = pattern
        self.cache_dir = corpus.default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self.num_workers = num_workers
        self.train: TextWindows | None = None
        self.validation: TextWindows | None = None
        self.test: TextWindows | None = None

    dtype = "uint8"
    """Type of an id."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become ``\\xff`` and the like."""
        return bytes(ids).decode(errors="backslashreplace")

    def file(self) -> Path:
        """Return the file of ids, created if missing."""
        return corpus.join_files(corpus.find_corpus(self.path, self.pattern), self.cache_dir)

    def prepare_data(self) -> None:
        """Concatenate a folder's files, on one rank per node."""
        self.file()

    def setup(self, stage: str) -> None:
        """Map the text and split it."""
        if self.train is not None:
            return
        # Reads only, unless setup is called without prepare_data.
        file = self.file()
        size = file.stat().st_size // np.dtype(self.dtype).itemsize
        world_size = self.trainer.world_size if self.trainer is not None else 1
        ranks = getattr(self.trainer.strategy, "ranks", None) if self.trainer is not None else None
        data_ranks = world_size if ranks is None else ranks.num_data_ranks
        problems = corpus.problems_of_size(size, self.seq_len, self.held_out, data_ranks)
        if problems:
            raise corpus.CorpusError(" ".join(problems))
        split = corpus.split_by_position(size, self.held_out)
        self.train = TextWindows(file, *split.train, self.seq_len, self.dtype)
        self.validation = TextWindows(file, *split.validation, self.seq_len, self.dtype)
        self.test = TextWindows(file, *split.test, self.seq_len, self.dtype)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return training windows, shuffled."""
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return validation windows, in order."""
        return self._loader(self.validation)

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Return test windows, in order."""
        return self._loader(self.test)

    def predict_dataloader(self) -> DataLoader[Tensor]:
        """Return test windows, in order."""
        return self._loader(self.test)

    def _loader(self, windows: TextWindows | None, shuffle: bool = False) -> DataLoader[Tensor]:
        return loader_of(windows, self.batch_size, self.num_workers, shuffle)


def loader_of(dataset: Dataset[Any] | None, batch_size: int, num_workers: int, shuffle: bool) -> DataLoader[Any]:
    """Return a loader of a data set, which exists after ``setup``."""
    assert dataset is not None, "setup has not run"
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=torch.cuda.is_available(),
    )
