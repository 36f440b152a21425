"""Windows of text as a LightningDataModule."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainwright.recipes.corpus import (
    CorpusError,
    default_cache_dir,
    find_corpus,
    join_files,
    num_windows,
    problems_of_size,
    split_by_position,
)


class TextWindows(Dataset[Tensor]):
    """Windows of ``seq_len + 1`` bytes of a part of a memory-mapped file.

    Window i begins at ``begin + i * seq_len``: every byte but the first is predicted exactly once.

    Args:
        file: the text.
        begin: first byte of the part.
        end: byte after its last.
        seq_len: bytes that a window predicts.
    """

    def __init__(self, file: Path, begin: int, end: int, seq_len: int) -> None:
        self.file = file
        self.begin = begin
        self.seq_len = seq_len
        self.windows = num_windows(end - begin, seq_len)
        self._bytes: np.ndarray | None = None

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> Tensor:
        """Bytes of window ``index``, uint8 ``(seq_len + 1,)``."""
        if not 0 <= index < self.windows:
            raise IndexError(f"window {index} of {self.windows}")
        if self._bytes is None:
            self._bytes = np.memmap(self.file, dtype=np.uint8, mode="r")
        start = self.begin + index * self.seq_len
        return torch.from_numpy(self._bytes[start : start + self.seq_len + 1].copy())

    def __getstate__(self) -> dict[str, Any]:
        # A pickled map would carry the whole text into every loader process.
        return {**self.__dict__, "_bytes": None}


class TextCorpus(LightningDataModule):
    """Text in windows of bytes, uint8 ``(B, seq_len + 1)``, split by position.

    The first part trains (shuffled); of the last ``held_out`` part, the first half validates, the second tests and is
    what ``predict`` reads. One file is mapped where it lies; a folder is joined once into a file under ``cache_dir``.

    Args:
        path: a UTF-8 text file, or a folder of them; ``None``: the source text of the running Python's standard
            library (about 11 MiB).
        seq_len: bytes that a window predicts.
        batch_size: windows per micro-batch.
        held_out: part of the text that is not trained on, more than 0, less than 1.
        pattern: shell-style pattern of the names of a folder's files.
        cache_dir: where a folder's joined text is kept; ``None``: ``~/.cache/trainwright/corpora``.
        num_workers: processes per rank that read ahead; 0: the rank itself reads (mapped text is quick).

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
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self.num_workers = num_workers
        self.train: TextWindows | None = None
        self.validation: TextWindows | None = None
        self.test: TextWindows | None = None

    def prepare_data(self) -> None:
        """Join a folder's files, on one rank of each node."""
        join_files(find_corpus(self.path, self.pattern), self.cache_dir)

    def setup(self, stage: str) -> None:
        """Map the text and split it."""
        if self.train is not None:
            return
        # Only reads: prepare_data has joined the files unless someone calls setup alone.
        file = join_files(find_corpus(self.path, self.pattern), self.cache_dir)
        size = file.stat().st_size
        ranks = self.trainer.world_size if self.trainer is not None else 1
        strategy = self.trainer.strategy if self.trainer is not None else None
        problems = problems_of_size(size, self.seq_len, self.held_out, getattr(strategy, "num_data_ranks", ranks))
        if problems:
            raise CorpusError(" ".join(problems))
        split = split_by_position(size, self.held_out)
        self.train = TextWindows(file, *split.train, self.seq_len)
        self.validation = TextWindows(file, *split.validation, self.seq_len)
        self.test = TextWindows(file, *split.test, self.seq_len)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Training windows, shuffled."""
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Validation windows, in order."""
        return self._loader(self.validation)

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Test windows, in order."""
        return self._loader(self.test)

    def predict_dataloader(self) -> DataLoader[Tensor]:
        """Test windows, in order."""
        return self._loader(self.test)

    def _loader(self, windows: TextWindows | None, shuffle: bool = False) -> DataLoader[Tensor]:
        assert windows is not None, "setup has not run"
        return DataLoader(
            windows,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
