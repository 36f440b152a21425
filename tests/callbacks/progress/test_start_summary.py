from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

from tests.callbacks.modules import Paper, Regression, loader, train
from tests.parity.layout_modules import make_module
from tests.parity.layouts import Texts
from trainwright import Trainer
from trainwright.callbacks.progress.start_summary import StartSummary
from trainwright.strategies.compose.hybrid import HybridStrategy

BYTES = 4 * sum(p.numel() for p in Regression().parameters())


def fit(**kwargs: Any) -> str:
    train(StartSummary(console := Paper()), **{"max_steps": 1, "logger": False, "data": loader(batch_size=2), **kwargs})
    return console.text


def test_one_device() -> None:
    shown = fit(kind=Trainer, global_batch_size=6)
    assert "SingleDeviceStrategy on 1 rank (cpu)" in shown
    assert "6 samples a step = micro-batch 2 x accumulation 3 x 1 data rank\n" in shown.replace(" \n", "\n").rstrip(" ")
    assert "45; each rank holds 0.00 MiB" in shown
    assert "32-true" in shown


def test_lightning_trainer() -> None:
    shown = fit(accumulate_grad_batches=2)
    assert "SingleDeviceStrategy on 1 rank (cpu)" in shown
    assert "micro-batch x accumulation 2 x 1 data rank" in shown


def test_final_lines(tmp_path: Path) -> None:
    console, folder = Paper(width=20), tmp_path / "runs" / "one"  # paths are not wrapped in narrow terminals
    logger = TensorBoardLogger(folder, name="", version="")
    train(StartSummary(console), max_steps=1, default_root_dir=folder, logger=logger)
    assert console.text.endswith("Run directory: runs/one\nTensorBoard:   tensorboard --logdir runs/one\n")


def of_ranks(strategy: str) -> str:
    return fit(kind=Trainer, strategy=strategy, global_batch_size=8)


@pytest.mark.parametrize(("strategy", "layout"), [("ddp", "replicate 2"), ("zero3", "shard 2")])
def test_ranks(ranks: Callable[..., list[Any]], strategy: str, layout: str) -> None:
    first, second = ranks(of_ranks, 2, strategy)
    assert f"on 2 ranks (cpu), {layout}" in first
    assert "8 samples a step = micro-batch 2 x accumulation 2 x 2 data ranks" in first
    assert second == ""


def of_a_cut_module() -> str:
    options: Any = {"strategy": HybridStrategy(pipeline=2, shard=1), "module": make_module("gpt")}
    return fit(kind=Trainer, data=DataLoader(Texts(8), batch_size=4), **options)


def test_pipeline_parameter_count(ranks: Callable[..., list[Any]]) -> None:
    first, _ = ranks(of_a_cut_module, 2)
    assert "HybridStrategy on 2 ranks (cpu), pipeline 2" in first
    assert f"{sum(p.numel() for p in make_module('gpt').parameters()):,}; each rank holds 0.07 MiB" in first
    assert "x 1 data rank" in first
