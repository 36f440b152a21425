"""The training part of a text in windows of bytes, without Lightning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.recipes.data.corpus import default_cache_dir, find_corpus, join_files, num_windows, split_by_position


class Windows(Dataset[Tensor]):
    """The training part of the text in windows of ``seq_len + 1`` bytes.

    Args:
        path: text; ``None``: the standard library's source.
        seq_len: bytes that a window predicts.
        held_out: part of the text that is not trained on.
    """

    def __init__(self, path: str | None, seq_len: int, held_out: float = 0.05) -> None:
        file = join_files(find_corpus(path), default_cache_dir())
        begin, end = split_by_position(file.stat().st_size, held_out).train
        self.seq_len = seq_len
        self.windows = num_windows(end - begin, seq_len)
        self._bytes = np.memmap(Path(file), dtype=np.uint8, mode="r")

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.seq_len
        return torch.from_numpy(self._bytes[start : start + self.seq_len + 1].copy())
