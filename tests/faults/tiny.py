"""A module with blocks that any layout cuts, small enough to be started again and again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright.core.run.peers import service_of

SAMPLES = 64


class Block(nn.Module):
    """One of the repeated parts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(torch.tanh(self.linear(hidden)))


class Tiny(pl.LightningModule):
    """Four blocks.

    Args:
        dropout: of every block.
        seconds: that a step takes at least.
        fail_at: step at which rank 1 raises, in every attempt; -1 = never.
        broken: while this file exists, the rank on device 1 dies before it trains; "" = never.
    """

    def __init__(self, dropout: float = 0.1, seconds: float = 0.0, fail_at: int = -1, broken: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        for block in self.blocks:
            block.dropout.p = dropout
        self.head = nn.Linear(8, 1)

    def setup(self, stage: str) -> None:
        if service_of(self.trainer.strategy).serves:
            _note_process(self.trainer)
        if os.environ["LOCAL_RANK"] == "1" and self.hparams.broken and Path(self.hparams.broken).exists():
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_start(self) -> None:
        _note_process(self.trainer)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_step == self.hparams.fail_at and self.global_rank == 1:
            raise ValueError(f"this fails always (process {os.getpid()})")
        time.sleep(self.hparams.seconds)
        hidden, target = batch
        for block in self.blocks:
            hidden = block(hidden)
        return (self.head(hidden) - target).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def _note_process(trainer: pl.Trainer) -> None:
    folder = Path(trainer.default_root_dir) / "pids"
    folder.mkdir(exist_ok=True)
    (folder / f"{trainer.global_rank}.{os.getpid()}").touch()


class KillServer(pl.Callback):
    """Kills the rank that only serves, once in a run.

    Args:
        at_step: of rank 0.
    """

    def __init__(self, at_step: int) -> None:
        self.at_step = at_step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.is_global_zero and trainer.global_step == self.at_step:
            servers = list((Path(trainer.default_root_dir) / "pids").glob(f"{trainer.world_size}.*"))
            if len(servers) == 1:  # the first attempt
                os.kill(int(servers[0].suffix[1:]), signal.SIGKILL)


class TinyData(pl.LightningDataModule):
    """Numbers, in another order in every epoch."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(5)
        hidden = torch.randn(SAMPLES, 8, generator=generator)
        return DataLoader(TensorDataset(hidden, hidden.sum(1, keepdim=True)), self.batch_size, shuffle=True)
