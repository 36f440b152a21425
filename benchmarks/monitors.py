"""What it costs to watch a step: monitors on against off, in turns.

All sides train the same small model on the CPU, one process, with steps of about 50 ms. The monitors are those of
`conf/monitor/<name>.yaml` without what writes to the terminal, with a run directory and windows of 50 steps, as is the
default; off is `monitor=none`. What counts is CPU time of the process, which other programs of the machine hardly
change, against a step of 50 ms. With `--layers 2 --width 32` a step is short, and its own noise small.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.alternate import alternate
from benchmarks.quiet import PLAIN_TRAINER, silence_lightning
from benchmarks.report import Goal, finish, table_of
from trainwright import compose
from trainwright.trainer.metrics_csv import MetricsCSV
from trainwright.trainer.trainer import Trainer

MOST_PART = 0.01
_STEP_US = 50_000
_TERMINAL = ("start_summary", "progress_bar")
_EVERY = 50


class Rows(Dataset[Tensor]):
    """``samples`` times the same row."""

    def __init__(self, samples: int, width: int) -> None:
        self.samples, self.row = samples, torch.randn(width)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return self.row


class Stack(pl.LightningModule):
    """Layers in a row.

    Args:
        layers: how many.
        width: of each.
    """

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean of the squares of the last layer's output."""
        hidden = batch
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class CPUTime(pl.Callback):
    """CPU time of this process and time by the clock per step, from the end of the first step to the last."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0
        self._begin: tuple[float, float, int] | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """After the first step, begin."""
        if self._begin is None:
            self._begin = time.process_time(), time.perf_counter(), trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End."""
        assert self._begin is not None
        steps = trainer.global_step - self._begin[2]
        self.cpu = (time.process_time() - self._begin[0]) / steps
        self.wall = (time.perf_counter() - self._begin[1]) / steps


def train(monitor: str, steps: int, layers: int, width: int) -> CPUTime:
    """Train under one choice of the group ``monitor``."""
    clock = CPUTime()
    with tempfile.TemporaryDirectory() as folder:
        cfg = compose(recipe="gpt", overrides=[f"monitor={monitor}", f"run_dir={folder}"])
        watching = [instantiate(each) for name, each in cfg.monitor.items() if name not in _TERMINAL and each]
        options: dict[str, Any] = {**PLAIN_TRAINER, "accelerator": "cpu", "devices": 1, "max_steps": steps}
        options |= {"log_every_n_steps": _EVERY, "logger": MetricsCSV(folder), "default_root_dir": folder}
        data = DataLoader(Rows(steps * 8, width), batch_size=8)
        Trainer(callbacks=[*watching, clock], **options).fit(Stack(layers, width), data)
        if monitor != "none":
            assert (Path(folder) / "monitor" / "rank_0.jsonl").stat().st_size, "the monitors have not written anything"
    return clock


def measure(monitors: list[str], steps: int, repeats: int, layers: int, width: int) -> list[dict[str, Any]]:
    """One row per choice: milliseconds of a step, and what it costs over ``none`` of the same round; medians."""
    sides: dict[str, Callable[[], CPUTime]] = {name: partial(train, name, steps, layers, width) for name in monitors}
    for name in monitors:
        train(name, 3, layers, width)  # the first fit imports
    taken = alternate(sides, repeats, lambda clock: f"{clock.wall * 1e3:.2f} ms a step")
    off = taken["none"]
    return [
        {
            "monitor": name,
            "wall_ms": round(median(each.wall for each in clocks) * 1e3, 3),
            "cpu_ms": round(median(each.cpu for each in clocks) * 1e3, 3),
            "ratio": round(median(a.cpu / b.cpu for a, b in zip(clocks, off, strict=True)), 5),
            "wall_ratio": round(median(a.wall / b.wall for a, b in zip(clocks, off, strict=True)), 5),
            "us_per_step": round(median(a.cpu - b.cpu for a, b in zip(clocks, off, strict=True)) * 1e6, 1),
        }
        for name, clocks in taken.items()
    ]


def goals_of(rows: list[dict[str, Any]], most: float = MOST_PART) -> list[Goal]:
    """Every choice costs at most so large a part of a step."""
    return [
        Goal(
            f"part of a step of 50 ms that monitor={row['monitor']} costs",
            round(row["us_per_step"] / _STEP_US, 5),
            most,
        )
        for row in rows
        if row["monitor"] != "none"
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.monitors", description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="steps of one measurement (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each side (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=24, help="of the model (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="of each layer (default: %(default)s)")
    options = parser.parse_args()
    silence_lightning()
    torch.set_num_threads(1)
    monitors = ["none", "default", "thorough"]
    rows = measure(monitors, options.steps, options.repeats, options.layers, options.width)
    title = f"Cost of monitors, medians of {options.repeats} measurements of {options.steps} steps"
    finish("monitors", [table_of(title, rows)], goals_of(rows), {"steps": options.steps, "rows": rows})


if __name__ == "__main__":
    main()
