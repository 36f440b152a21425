"""A module that records each rank's samples and final state; see survivors.py."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset


def digest(tensors):
    """Return a hash of names and bits."""
    digested = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digested.update(name.encode() + tensor.detach().numpy().tobytes())
    return digested.hexdigest()


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(pl.LightningModule):
    """Four blocks.

    Args:
        width: of the blocks.
        sleep: seconds that a step takes at least while ranks are missing, so that replacements find the run alive.
        full: number of ranks when none is missing.
    """

    def __init__(self, width=8, sleep=0.0, full=0):
        super().__init__()
        self.save_hyperparameters()
        self.first = torch.nn.Linear(4, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(4))
        self.last = torch.nn.Linear(width, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.world_size < self.hparams.full:
            time.sleep(self.hparams.sleep)

    def training_step(self, batch, batch_idx):
        self.note(batch["index"].tolist())
        return (self(batch["x"]) - batch["y"]).square().mean()

    def on_train_batch_start(self, batch, batch_idx):
        outer = getattr(getattr(self.trainer.strategy, "replicas", None), "_outer", None)
        if outer is not None:
            self.note_common(outer)

    def note_common(self, outer):
        """One line per micro-batch: generation, step, rank, digests of what is common, and of its own."""
        found = [digest(tensors) for tensors in (outer.common(), outer.momentum(), dict(self.named_parameters()))]
        self._append("common", self.trainer.global_rank, *found)

    def note(self, samples):
        """One line per micro-batch: generation, step, data rank, samples."""
        self._append("read", self.trainer.strategy.ranks.data_rank, samples)

    def _append(self, kind, *values):
        path = Path(self.trainer.default_root_dir, kind, f"{os.getpid()}.jsonl")
        path.parent.mkdir(exist_ok=True)
        generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        with path.open("a") as file:
            file.write(json.dumps([generation, self.trainer.global_step, *values]) + "\n")

    def on_train_end(self):
        whole = {name: value.double().flatten().tolist() for name, value in self.trainer.strategy.whole_parameters()}
        # What each replica has of its own: they must be equal to the last bit.
        own = {
            name: parameter.detach().double().flatten().tolist()
            for name, parameter in self.named_parameters()
            if not hasattr(parameter, "to_local")
        }
        path = Path(self.trainer.default_root_dir, f"end_{self.trainer.global_rank}.json")
        rank = self.trainer.strategy.layout.coordinates(self.trainer.global_rank)
        path.write_text(json.dumps({"whole": whole, "own": own, "rank": rank}))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Points(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        x = torch.tensor([index % 7, index % 5, index % 3, 1.0]) / 7
        return {"index": torch.tensor(index), "x": x, "y": x.sum().sin().view(1)}


class Data(pl.LightningDataModule):
    def __init__(self, batch_size=2):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(Points(), batch_size=self.batch_size, shuffle=True)
