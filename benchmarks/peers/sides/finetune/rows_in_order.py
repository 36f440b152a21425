"""The rows of the recipe in a known order, which the peers are given too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trainwright.recipes.finetune.data import FineTuneData


class RowsInOrder(FineTuneData):
    """Full rows alone, drawn once for all steps: so the mean over ranks is the mean over tokens on every side.

    Args:
        count: rows to draw.
        **options: see :class:`~trainwright.recipes.finetune.data.FineTuneData`.
    """

    def __init__(self, count: int, **options: Any) -> None:
        super().__init__(**options)
        self.count = count

    def setup(self, stage: str) -> None:
        """As there, then draw."""
        if self.train is not None:
            return
        super().setup(stage)
        assert self.train is not None
        full = [row for row in self.train.rows if sum(piece.size for piece in row) == self.seq_len]
        order = torch.randint(len(full), (self.count,), generator=torch.Generator().manual_seed(1))
        self.train.rows = [full[number] for number in order.tolist()]

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """In order."""
        return self._loader(self.train)
