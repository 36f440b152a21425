"""Workload of fault benchmarks: a small transformer, and a clock of its steps and their samples."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SAMPLES = 100_000
_VOCABULARY, _LENGTH = 64, 48


class Digits(Dataset[dict[str, Tensor]]):
    """Samples that follow from their index: digits of a sum, which can be learned."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        start, step = torch.randint(_VOCABULARY, (2,), generator=draw).tolist()
        tokens = (start + step * torch.arange(_LENGTH + 1)) % _VOCABULARY
        return {"index": torch.tensor(index), "tokens": tokens}


class Data(pl.LightningDataModule):
    """Shuffled samples.

    Args:
        batch_size: samples per micro-batch.
        num_workers: processes that read them.
    """

    def __init__(self, batch_size: int = 2, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Over all samples."""
        return DataLoader(Digits(), batch_size=self.batch_size, shuffle=True, num_workers=self.num_workers)


class Net(pl.LightningModule):
    """Predicts the next token.

    Args:
        width: of the residual stream.
        layers: blocks.
    """

    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(_VOCABULARY, width)
        self.place = torch.nn.Embedding(_LENGTH, width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = torch.nn.Linear(width, _VOCABULARY)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of the micro-batch."""
        tokens = batch["tokens"]
        x = self.embed(tokens[:, :-1]) + self.place.weight
        mask = torch.nn.Transformer.generate_square_subsequent_mask(_LENGTH, device=x.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = self.head(x)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


class Clock(pl.Callback):
    """One line per micro-batch of this process.

    When, CPU seconds so far, generation, step, data rank, samples, whether it ended a step.
    """

    def __init__(self) -> None:
        self._file: Any = None
        self._steps = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open this process's file."""
        folder = Path(trainer.default_root_dir, "clock")
        folder.mkdir(exist_ok=True)
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the line."""
        stepped, self._steps = trainer.global_step > self._steps, trainer.global_step
        strategy: Any = trainer.strategy
        step = trainer.global_step - stepped
        samples = batch["index"].tolist()
        line = [time.time(), time.process_time(), _generation(), step, strategy.ranks.data_rank, samples, stepped]
        self._file.write(json.dumps(line) + "\n")


def _generation() -> list[int]:
    """When the ranks met that train together now, and how often they had met before."""
    return [int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), int(os.environ.get("MASTER_PORT", "0"))]
