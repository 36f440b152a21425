"""Overhead of training loops over a bare PyTorch loop, in microseconds per step.

The module is so small that the loop dominates. Four sides take turns: the bare loop (which logs nothing),
Lightning's Trainer, Lightning Fabric and ``trainwright.Trainer``; first with a module that logs nothing, then with one
that calls ``self.log`` once a step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.alternate import alternate
from benchmarks.quiet import PLAIN_TRAINER, silence_lightning
from benchmarks.report import Goal, finish, say, table_of
from trainwright.trainer.trainer import Trainer

MOST_MICROSECONDS = 50.0
MOST_PART_OF_LIGHTNING = 1 / 3
QUIET, LOGGING = "logs nothing", "logs once a step"


class Vectors(Dataset[Tensor]):
    """``samples`` random vectors of 32 numbers."""

    def __init__(self, samples: int) -> None:
        self.vectors = torch.randn(samples, 32)

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> Tensor:
        return self.vectors[index]


class Tiny(pl.LightningModule):
    """One small matrix.

    Args:
        logs: whether ``training_step`` calls ``self.log``.
    """

    def __init__(self, logs: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)
        self.logs = logs

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Sum of the outputs."""
        loss: Tensor = self.layer(batch).sum()
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Cost(NamedTuple):
    """Microseconds of one step."""

    cpu: float
    """CPU time of the whole process."""
    wall: float
    """Time on the clock."""


class Stopwatch:
    """Cost per step of what happens between :meth:`start` and :meth:`stop`."""

    def start(self) -> None:
        """Begin."""
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self, steps: int) -> Cost:
        """End, after that many steps."""
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        return Cost(cpu / steps * 1e6, wall / steps * 1e6)


class TimeTraining(pl.Callback):
    """Measures from the start of training to its end; it listens to nothing that happens within."""

    def __init__(self, steps: int) -> None:
        self._watch = Stopwatch()
        self._steps = steps
        self.cost = Cost(0.0, 0.0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start."""
        self._watch.start()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop."""
        self.cost = self._watch.stop(self._steps)


def bare(data: Vectors) -> Cost:
    """A loop that does what training needs and nothing else."""
    module, watch = Tiny(logs=False), Stopwatch()
    optimizer = module.configure_optimizers()
    watch.start()
    for batch in _loader(data):
        optimizer.zero_grad()
        loss = module.layer(batch).sum()
        loss.backward()
        optimizer.step()
    return watch.stop(len(data))


def fabric(data: Vectors, logs: bool) -> Cost:
    """The same loop written with Fabric."""
    runner, watch = Fabric(accelerator="cpu", devices=1), Stopwatch()
    module = Tiny(logs)
    wrapped, optimizer = runner.setup(module, module.configure_optimizers())
    wrapped.mark_forward_method("training_step")
    loader = runner.setup_dataloaders(_loader(data))
    watch.start()
    for index, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = wrapped.training_step(batch, index)
        runner.backward(loss)
        optimizer.step()
    return watch.stop(len(data))


def trainer(data: Vectors, logs: bool, kind: type[pl.Trainer]) -> Cost:
    """A Trainer, Lightning's or ours."""
    clock = TimeTraining(len(data))
    options: dict[str, Any] = {**PLAIN_TRAINER, "max_epochs": 1, "accelerator": "cpu", "devices": 1}
    kind(callbacks=[clock], **options).fit(Tiny(logs), _loader(data))
    return clock.cost


def measure(logs: bool, steps: int, repeats: int) -> list[dict[str, Any]]:
    """One row per side: microseconds a step, and over the bare loop of the same round; medians.

    Args:
        logs: whether the module calls ``self.log`` once a step; the bare loop never logs.
        steps: steps of one measurement.
        repeats: measurements of each side.
    """
    data = Vectors(steps)
    sides: dict[str, Callable[[], Cost]] = {
        "bare loop": partial(bare, data),
        "Lightning Trainer": partial(trainer, data, logs, pl.Trainer),
        "Lightning Fabric": partial(fabric, data, logs),
        "trainwright.Trainer": partial(trainer, data, logs, Trainer),
    }
    warm = Vectors(min(steps, 50))
    for kind in (pl.Trainer, Trainer):
        trainer(warm, logs, kind)  # the first fit imports and compiles
    fabric(warm, logs)
    taken = alternate(sides, repeats, lambda cost: f"{cost.cpu:.0f} us")
    return [
        {
            "case": LOGGING if logs else QUIET,
            "side": side,
            "cpu_us_per_step": round(median(cost.cpu for cost in costs), 1),
            "cpu_us_over_bare": _over([c.cpu for c in costs], [c.cpu for c in taken["bare loop"]]),
            "wall_us_per_step": round(median(cost.wall for cost in costs), 1),
            "wall_us_over_bare": _over([c.wall for c in costs], [c.wall for c in taken["bare loop"]]),
        }
        for side, costs in taken.items()
    ]


def _over(times: list[float], bare_times: list[float]) -> float:
    """Median of the differences within each round."""
    return round(median(t - b for t, b in zip(times, bare_times, strict=True)), 1)


def goals_of(rows: list[dict[str, Any]]) -> list[Goal]:
    """The bounds of both cases."""
    over = {(row["case"], row["side"]): row["cpu_us_over_bare"] for row in rows}
    part = over[LOGGING, "trainwright.Trainer"] / over[LOGGING, "Lightning Trainer"]
    return [
        Goal("us a step over the bare loop, nothing logged", over[QUIET, "trainwright.Trainer"], MOST_MICROSECONDS),
        Goal("part of Lightning's overhead, logged once a step", round(part, 4), MOST_PART_OF_LIGHTNING),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="steps of one measurement (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each side (default: %(default)s)")
    options = parser.parse_args()
    silence_lightning()
    torch.set_num_threads(1)
    rows = []
    for logs in (False, True):
        say(f"a module that {'calls self.log once a step' if logs else 'logs nothing'}")
        rows += measure(logs, options.steps, options.repeats)
    title = f"Overhead of a step, medians of {options.repeats} measurements of {options.steps} steps"
    finish("overhead", [table_of(title, rows)], goals_of(rows), {"steps": options.steps, "rows": rows})


def _loader(data: Vectors) -> DataLoader[Tensor]:
    return DataLoader(data, batch_size=1)


if __name__ == "__main__":
    main()
