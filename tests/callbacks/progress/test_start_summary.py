import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from torch.utils.data import DataLoader

from tests.callbacks.modules import QUIET, Regression, loader
from tests.parity.layout_modules import make_module
from tests.parity.layouts import Texts
from trainwright import Trainer
from trainwright.callbacks.progress.start_summary import StartSummary
from trainwright.strategies.compose.hybrid import HybridStrategy

BYTES = 4 * sum(p.numel() for p in Regression().parameters())


def fit(trainer_class: type[LightningTrainer], **kwargs: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    trainer_class(callbacks=[StartSummary(console)], max_steps=1, **kwargs, **QUIET).fit(
        Regression(), loader(batch_size=2)
    )
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_one_device() -> None:
    shown = fit(Trainer, devices=1, global_batch_size=6)
    assert "SingleDeviceStrategy on 1 rank (cpu)" in shown
    assert "6 samples a step = micro-batch 2 x accumulation 3 x 1 data rank\n" in shown.replace(" \n", "\n").rstrip(" ")
    assert "45; each rank holds 0.00 MiB" in shown
    assert "32-true" in shown


def test_lightning_trainer() -> None:
    shown = fit(LightningTrainer, devices=1, accumulate_grad_batches=2)
    assert "SingleDeviceStrategy on 1 rank (cpu)" in shown
    assert "micro-batch x accumulation 2 x 1 data rank" in shown


def test_final_lines(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=20)  # paths are not wrapped in narrow terminals
    kwargs = {**QUIET, "logger": TensorBoardLogger(tmp_path / "runs" / "one", name="", version="")}
    LightningTrainer(
        callbacks=[StartSummary(console)], max_steps=1, devices=1, default_root_dir=tmp_path / "runs" / "one", **kwargs
    ).fit(Regression(), loader())
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().endswith("Run directory: runs/one\nTensorBoard:   tensorboard --logdir runs/one\n")


def of_ranks(strategy: str) -> str:
    return fit(Trainer, strategy=strategy, devices=dist.get_world_size(), global_batch_size=8)


@pytest.mark.parametrize(("strategy", "layout"), [("ddp", "replicate 2"), ("zero3", "shard 2")])
def test_ranks(ranks: Callable[..., list[Any]], strategy: str, layout: str) -> None:
    first, second = ranks(of_ranks, 2, strategy)
    assert f"on 2 ranks (cpu), {layout}" in first
    assert "8 samples a step = micro-batch 2 x accumulation 2 x 2 data ranks" in first
    assert second == ""


def of_a_cut_module() -> str:
    console = Console(file=io.StringIO(), width=200)
    strategy: Any = HybridStrategy(pipeline=2, shard=1)
    trainer = Trainer(callbacks=[StartSummary(console)], max_steps=1, devices=2, strategy=strategy, **QUIET)
    trainer.fit(make_module("gpt"), DataLoader(Texts(8), batch_size=4))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_pipeline_parameter_count(ranks: Callable[..., list[Any]]) -> None:
    first, _ = ranks(of_a_cut_module, 2)
    assert "HybridStrategy on 2 ranks (cpu), pipeline 2" in first
    assert f"{sum(p.numel() for p in make_module('gpt').parameters()):,}; each rank holds 0.07 MiB" in first
    assert "x 1 data rank" in first
