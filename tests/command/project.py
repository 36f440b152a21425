"""A user's project outside the package: a plain Lightning module and its configuration."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.warm import warm_run

MODULE = """
import time

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class MyModule(pl.LightningModule):
    def __init__(self, hidden=8, fail_rank=-1, sleep=0.0):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1))

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            print("first step of rank", self.global_rank, flush=True)
        if batch_idx == 1 and self.global_rank == self.hparams.fail_rank:
            print("rank", self.global_rank, "is about to fail", flush=True)
            raise ValueError(f"boom in rank {self.global_rank}")
        time.sleep(self.hparams.sleep)
        loss = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).pow(2).mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.net(batch[0]).pow(2).mean())

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class MyData(pl.LightningDataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.batch_size = batch_size

    def _loader(self, samples):
        values = torch.arange(4.0 * samples).view(samples, 4) / samples
        return DataLoader(TensorDataset(values), batch_size=self.batch_size)

    def train_dataloader(self):
        return self._loader(64)

    def val_dataloader(self):
        return self._loader(10)

    test_dataloader = predict_dataloader = val_dataloader
"""

RECIPE = """# @package _global_
# A recipe of my own.
name: mine
max_steps: 4
micro_batch_size: 4
module:
  _target_: my_module.MyModule
  hidden: 8
  fail_rank: -1
  sleep: 0.0
data:
  _target_: my_module.MyData
  batch_size: ${micro_batch_size}
"""


def write_project(folder: Path) -> Path:
    """Write the project into a folder; return its configuration directory."""
    (folder / "my_module.py").write_text(MODULE, encoding="utf-8")
    recipes = folder / "my_conf" / "recipe"
    recipes.mkdir(parents=True)
    (recipes / "mine.yaml").write_text(RECIPE, encoding="utf-8")
    return folder / "my_conf"


def command(*words: str) -> list[str]:
    """Return the command line for this Python."""
    return [sys.executable, "-m", "trainwright", *words]


def environment() -> dict[str, str]:
    """Return the environment of a user's shell: no launcher and no thread settings of the tests."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS")
    return {name: value for name, value in os.environ.items() if name not in names}


def run_command(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, with standard error in its text output."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": environment()} | options
    return warm_run(command(*words), timeout=120, **options)


def problems_of(*words: str, conf: Path | None = None, verb: str = "fit", launcher: Any = None) -> list[str]:
    """Return all problems reported for a command line before anything is started."""
    from trainwright.command.run import plan
    from trainwright.command.schema.compose import compose_checked

    result = compose_checked(words, conf)
    checked = result.cfg is not None and result.guessed
    return [*result.problems, *(plan(result.cfg, verb, launcher)[1] if checked else [])]
