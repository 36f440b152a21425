"""Measured against planned step times, where ranks see different files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.callbacks.modules import Paper, loader, train
from trainwright import Trainer
from trainwright.callbacks.progress.plan_check import FILE, PlanCheck
from trainwright.core.layout import Layout

HELD = {"parameters": 180, "gradients": 180, "optimizer": 0}


def measure(planned_on: int) -> tuple[bool, str]:
    """Return whether this rank has measured, and its output; each rank has its own folder."""
    folder = Path(f"planned_on_{planned_on}", f"machine_{dist.get_rank()}")
    folder.mkdir(parents=True)
    if dist.get_rank() == planned_on:
        chosen = {
            "layout": Layout(replicate=dist.get_world_size()).sizes,
            "micro_batch_size": 2,
            "accumulation": 1,
            "seconds": {"step": 1.0},
            "bytes": {"total": 540},
            "bytes_at_step": HELD,
        }
        (folder / FILE).write_text(json.dumps({"chosen": chosen}))
    check = PlanCheck(steps=1, console=(console := Paper()))
    train(check, kind=Trainer, strategy="ddp", max_steps=4, default_root_dir=folder, data=loader(batch_size=2))
    return check.measured is not None, console.text


def test_rank_zero_prints_plan(ranks: Callable[..., list[Any]]) -> None:
    (first, said), (second, nothing) = ranks(measure, 2, 0)
    assert (first, second, nothing) == (True, True, "")
    assert said.startswith("Plan: a step takes ")
    assert [found for found, _ in ranks(measure, 2, 1)] == [False, False]
