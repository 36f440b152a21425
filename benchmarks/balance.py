"""One straggler that takes four times as long per sample: equal shares of the global batch against ``balance=auto``.

Data parallel training of a small network on the CPU. What a device takes for a sample is a sleep (all ranks sleep, the
slow one longer), so that ranks do not compete for the cores of this machine. Both sides train the same steps in turns;
reported are samples per second after the steps in which shares are tuned, and the difference of the losses.
"""

from __future__ import annotations

import argparse
import io
import time
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.alternate import alternate
from benchmarks.quiet import PLAIN_TRAINER, silence_lightning
from benchmarks.ranks import run_ranks
from benchmarks.report import Goal, finish, table_of
from trainwright.strategies.contract.registry import make_strategy
from trainwright.trainer.trainer import Trainer

LEAST_RATIO = 1.8
MOST_DIFFERENCE = 1e-6
_SIZE, _CLASSES = 32, 10
_SIDES = ("equal shares", "balance=auto")


@dataclass(frozen=True)
class Work:
    """Workload.

    Args:
        strategy: by name.
        micro_batch_size: samples of a rank with equal shares.
        steps: optimizer steps, those left out included.
        left_out: the first steps, in which shares are found.
        milliseconds: that a rank takes for a sample.
        slowness: how many times as long the last rank takes.
    """

    strategy: str
    micro_batch_size: int
    steps: int
    left_out: int
    milliseconds: float
    slowness: float


@dataclass(frozen=True)
class Taken:
    """Result of one training.

    Args:
        samples_per_second: after the steps that are left out.
        losses: of every step, over the global batch.
        shares: samples of each rank in the end.
    """

    samples_per_second: float
    losses: list[float]
    shares: list[int]


class Points(Dataset[tuple[Tensor, Tensor]]):
    """``samples`` random points float32 ``(32,)`` of ten linearly separable classes."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.points = torch.randn(samples, _SIZE, generator=generator)
        self.classes = self.points[:, :_CLASSES].argmax(1)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.classes[index]


class Model(pl.LightningModule):
    """A small network on a device that takes its time.

    Args:
        seconds: for a sample.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seconds = seconds
        self.net = nn.Sequential(nn.Linear(_SIZE, 64), nn.ReLU(), nn.Linear(64, _CLASSES))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of the classes."""
        points, classes = batch
        time.sleep(self.seconds * len(points))
        return nn.functional.cross_entropy(self.net(points), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD, which shows a gradient of another size."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Watch(pl.Callback):
    """Times the steps after those that are left out, and keeps every loss.

    Args:
        left_out: optimizer steps.
    """

    def __init__(self, left_out: int) -> None:
        self.left_out = left_out
        self.begin = self.end = 0.0
        self._losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the loss and the time."""
        self._losses.append(outputs["loss"].detach())
        self.end = time.perf_counter()
        if trainer.global_step == self.left_out:
            self.begin = self.end

    def losses(self) -> list[float]:
        """Of every step, over the global batch. A collective."""
        together = torch.stack(self._losses)
        dist.all_reduce(together)
        whole: list[float] = (together / dist.get_world_size()).tolist()
        return whole


def train(work: Work, side: str) -> Taken:
    """Train once, on every rank at the same time."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    seconds = work.milliseconds / 1e3 * (work.slowness if rank == ranks - 1 else 1.0)
    watch = Watch(work.left_out)
    options: dict[str, Any] = {**PLAIN_TRAINER, "max_steps": work.steps, "max_epochs": -1, "accelerator": "cpu"}
    global_batch = work.micro_batch_size * ranks
    trainer = Trainer(
        strategy=make_strategy(work.strategy),
        devices=ranks,
        callbacks=[watch],
        global_batch_size=global_batch,
        balance={"every_steps": 5} if side == _SIDES[1] else "none",
        **options,
    )
    dist.barrier()
    loader = DataLoader(Points(global_batch * 16), batch_size=work.micro_batch_size, shuffle=True)
    trainer.fit(Model(seconds), loader)
    shares = [work.micro_batch_size] * ranks if trainer.balance is None else trainer.balance.shares
    measured = global_batch * (work.steps - work.left_out)
    return Taken(measured / (watch.end - watch.begin), watch.losses(), shares)


def measure(work: Work, repeats: int) -> dict[str, list[Taken]]:
    """On one rank: both sides in turns."""
    silence_lightning()
    sides = {side: lambda side=side: train(work, side) for side in _SIDES}  # type: ignore[misc]
    # Every rank takes the same turns; the first one tells.
    with nullcontext() if dist.get_rank() == 0 else redirect_stderr(io.StringIO()):
        return alternate(sides, repeats, lambda taken: f"{taken.samples_per_second:.0f} samples/s")


def ideal_ratio(work: Work, shares: list[int]) -> float:
    """By how much a step would be shorter if there were nothing but samples."""
    slow = work.slowness
    return work.micro_batch_size * slow / max(*shares[:-1], shares[-1] * slow)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.balance", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, default=3, help="how many, the last of which is slow (default: %(default)s)")
    add("--strategy", default="ddp", help="by name (default: %(default)s)")
    add("--repeats", type=int, default=5, help="trainings of each side (default: %(default)s)")
    add("--steps", type=int, default=60, help="optimizer steps of a training (default: %(default)s)")
    add("--left-out", type=int, default=20, help="steps of these before the clock begins (default: %(default)s)")
    add("--micro-batch", type=int, default=32, help="samples of a rank with equal shares (default: %(default)s)")
    add("--milliseconds", type=float, default=1.0, help="of a rank for a sample (default: %(default)s)")
    add("--slowness", type=float, default=4.0, help="times as long on the last rank (default: %(default)s)")
    options = parser.parse_args()
    if options.ranks < 2 or options.repeats < 1 or not 0 < options.left_out < options.steps:
        parser.error("--ranks must be at least 2, --repeats at least 1, --left-out from 1 to less than --steps")
    work = Work(
        options.strategy, options.micro_batch, options.steps, options.left_out, options.milliseconds, options.slowness
    )
    taken = run_ranks(measure, options.ranks, work, options.repeats)[0]
    equal, auto = (taken[side] for side in _SIDES)
    ratios = [b.samples_per_second / a.samples_per_second for a, b in zip(equal, auto, strict=True)]
    losses = [pair for a, b in zip(equal, auto, strict=True) for pair in zip(a.losses, b.losses, strict=True)]
    difference = max(abs(one - other) / abs(one) for one, other in losses)
    rows = [
        {
            "side": side,
            "samples_per_second": round(median(each.samples_per_second for each in taken[side])),
            "least": round(min(each.samples_per_second for each in taken[side])),
            "most": round(max(each.samples_per_second for each in taken[side])),
            "shares": ", ".join(map(str, taken[side][-1].shares)),
            "last_loss": round(taken[side][-1].losses[-1], 6),
        }
        for side in _SIDES
    ]
    goals = [
        Goal("samples per second of balance=auto over those of equal shares", median(ratios), LEAST_RATIO, True),
        Goal("largest relative difference of a loss", difference, MOST_DIFFERENCE),
    ]
    ideal = ideal_ratio(work, auto[-1].shares)
    title = f"{options.ranks} ranks, {options.strategy}, the last takes {options.slowness:g} times as long for a sample"
    result = {"rows": rows, "ratio": round(median(ratios), 3), "ideal_ratio": round(ideal, 3)}
    finish("balance", [table_of(title, rows)], goals, {**result, "difference": difference})


if __name__ == "__main__":
    main()
