"""A project around ``transformers.LlamaForCausalLM``, written for plain Lightning, on 2 stages x 2 ranks per weight."""

from __future__ import annotations

import csv
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, DistributedSampler

from tests.command.project import command, environment
from tests.parity.harness import QUIET
from tests.warm import warm_run
from trainwright import Trainer
from trainwright.checkpoint.read.run_state import RunState
from trainwright.strategies.compose.hybrid import HybridStrategy

PROJECT = Path(__file__).parent / "plain_project"
LOGGED = {"train_loss", "lr", "val_loss", "val_accuracy", "epochs_done"}


def fit(
    folder: str, kind: type[LightningTrainer], options: dict[str, Any], shuffled: bool = False
) -> tuple[dict[str, float], float]:
    """Train, and return this rank's ``callback_metrics`` and learning rate at the end.

    Args:
        folder: for metrics.csv.
        kind: of Trainer.
        options: of the layout; none is one process.
        shuffled: in the order in which Lightning deals training samples to one of several ranks.
    """
    if str(PROJECT) not in sys.path:
        sys.path.insert(0, str(PROJECT))
    from my_llama import MyLlama, MyTokens

    seed_everything(0)
    strategy = {"strategy": HybridStrategy(**options)} if options else {}
    trainer = kind(
        max_epochs=2,
        devices=4 if options else 1,
        log_every_n_steps=1,
        **{**QUIET, "logger": CSVLogger(folder, name="", version=""), **strategy},
    )
    data = MyTokens()
    if shuffled:
        loader = data.train_dataloader()
        sampler = DistributedSampler(loader.dataset, 1, 0, shuffle=True, seed=0)
        data.train_dataloader = lambda: DataLoader(loader.dataset, batch_size=4, sampler=sampler)
    trainer.fit(MyLlama(), datamodule=data)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, rate


def rows(folder: Path) -> list[dict[str, float]]:
    """Return logged values by step and name."""
    found: dict[int, dict[str, float]] = {}
    with (folder / "metrics.csv").open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            values = {name: float(row[name]) for name in LOGGED if row.get(name)}
            found.setdefault(int(float(row["step"])), {}).update(values)
    return [found[step] for step in sorted(found)]


def approximately(wanted: list[dict[str, float]]) -> list[Any]:
    return [pytest.approx(row, rel=1e-5) for row in wanted]


LAYOUT = {"pipeline": 2, "tensor": 2}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [Trainer, LightningTrainer])
def test_from_python(tmp_path: Path, ranks: Callable[..., list[Any]], kind: type[LightningTrainer]) -> None:
    folder, shuffled = str(tmp_path / "alone"), kind is LightningTrainer
    ((metrics, rate),) = ranks(fit, 1, folder, LightningTrainer, {}, shuffled, init_group=False)
    results = ranks(fit, 4, str(tmp_path / "layout"), kind, LAYOUT, timeout=90)
    wanted = rows(tmp_path / "alone")
    assert rows(tmp_path / "layout") == approximately(wanted)
    assert wanted[-1]["val_loss"] < wanted[0]["train_loss"] - 0.3
    for found, last_rate in results:
        assert found == pytest.approx(metrics, rel=1e-5)
        assert last_rate == rate


@pytest.mark.thorough
def test_from_the_command_line(tmp_path: Path, ranks: Callable[..., list[Any]]) -> None:
    ranks(fit, 1, str(tmp_path / "alone"), LightningTrainer, {}, init_group=False)
    shutil.copytree(PROJECT, tmp_path / "project")
    words = ("strategy=hybrid", "strategy.pipeline=2", "strategy.tensor=2", "devices=4", "run_dir=layout")
    quiet = ("monitor=none", "logger=csv", "trainer.log_every_n_steps=1")
    done = warm_run(
        command("fit", "--config-dir", "conf", "recipe=my_llama", *words, *quiet),
        capture_output=True,
        cwd=tmp_path / "project",
        env=environment(),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "project/layout") == approximately(rows(tmp_path / "alone"))
    (checkpoint,) = (tmp_path / "project/layout/checkpoints").iterdir()
    state = RunState.open(str(checkpoint))
    assert state.shape("weights/model.model.layers.3.mlp.up_proj.weight") == (64, 32)
