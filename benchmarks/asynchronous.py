"""Samples per second and seconds to a target loss with stragglers: synchronous, bounded staleness, async, local steps.

The ``digits`` recipe, the same number of epochs for each side: DDP, parameter servers under every consistency (and
``async`` with leased samples), local SGD and DiLoCo. What a device takes for a step is a sleep, so that ranks do not
compete for the cores of this machine. That only holds on an idle machine: on a busy one all ranks wait for cores,
stragglers no longer matter and every ratio approaches 1. The fraction of time in which rank 0 was runnable without a
core is therefore reported too; above 10 % the figures say nothing about the sides. Three straggler patterns:

========  ==============================================================================================
none      all ranks take the same time
stalls    each step of each rank takes 120 ms longer with a chance of 10 %, seeded, the same for all sides
slow      the last rank takes four times as long, always
========  ==============================================================================================

Rank 0 records its parameters and the time every ``--sync-every`` steps; their loss on the test images is computed
after training. These are steps after which local SGD and DiLoCo hold the same on all ranks; of asynchronous
workers it is what rank 0 has pulled. Workers that step alone make one update for each of their batches, so ``ssp`` and
``async`` train with the learning rate divided by the number of ranks; all others with ``--lr``. None was tuned.
"""

from __future__ import annotations

import argparse
import io
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from benchmarks.alternate import alternate
from benchmarks.quiet import PLAIN_TRAINER, silence_lightning
from benchmarks.ranks import run_ranks, say_from_first
from benchmarks.report import Goal, finish, say, table_of
from trainwright.recipes.vision.digits import DigitsData, DigitsModule
from trainwright.strategies.contract.registry import make_strategy
from trainwright.trainer.trainer import Trainer

# Throughput in units of DDP's, of workers that do not wait.
LEAST_STALLS = 1.3
LEAST_SLOW = 1.8
# Part of the time without a core, above which ratios say nothing.
MOST_WAITED = 0.1
DELAYS = ("none", "stalls", "slow")
_CHANNELS, _BLOCKS = 8, 1
_WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Side:
    """One way to train.

    Args:
        strategy: by name.
        options: of the strategy.
        steps_alone: whether each batch of each worker is an update of its own.
    """

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    steps_alone: bool = False


@dataclass(frozen=True)
class Work:
    """Workload.

    Args:
        epochs: over 1,257 images.
        micro_batch_size: samples of a rank.
        learning_rate: of AdamW, for the average over all ranks.
        sync_every: steps between two synchronisations of local updates, and between two losses.
        staleness: of ``ssp``.
        milliseconds: that a rank takes for a step.
        target: loss on the test images.
    """

    epochs: int
    micro_batch_size: int
    learning_rate: float
    sync_every: int
    staleness: int
    milliseconds: float
    target: float


@dataclass(frozen=True)
class Taken:
    """Result of one training.

    Args:
        samples_per_second: of all ranks, from the first step to when all have ended.
        seconds_to_target: until rank 0 held parameters of the target loss; ``None``: it never did.
        final_loss: on the test images, at the end.
        waited: part of the time in which rank 0's main thread could have run and had no core; ``None``: not known
            here.
    """

    samples_per_second: float
    seconds_to_target: float | None
    final_loss: float
    waited: float | None


def sides_of(work: Work) -> dict[str, Side]:
    """The sides by name."""
    server = "parameter_server"
    return {
        "ddp": Side("ddp"),
        "sync": Side(server),
        "ssp": Side(server, {"consistency": "ssp", "staleness": work.staleness}, True),
        "async": Side(server, {"consistency": "async"}, True),
        "async, leases": Side(server, {"consistency": "async", "leases": "at_least_once"}, True),
        "local_sgd": Side("local_sgd", {"sync_every": work.sync_every}),
        # The momentum of 0.9 takes some tens of outer steps to settle, see docs/local_updates.md.
        "diloco": Side("diloco", {"sync_every": work.sync_every, "outer_momentum": 0.5}),
    }


class Delay(pl.Callback):
    """The time that a device takes for a micro-batch, and being late.

    Args:
        kind: of :data:`DELAYS`.
        seconds: of a rank that is not late.
        seed: of the stalls, with the rank.
    """

    def __init__(self, kind: str, seconds: float, seed: int) -> None:
        rank = dist.get_rank()
        is_last = rank == dist.get_world_size() - 1
        self.seconds = seconds * (4 if kind == "slow" and is_last else 1)
        self.stalls = random.Random(f"{seed} {rank}") if kind == "stalls" else None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Sleep."""
        stalled = self.stalls is not None and self.stalls.random() < 0.1
        time.sleep(self.seconds + (0.12 if stalled else 0.0))


class Watch(pl.Callback):
    """Counts samples, and on rank 0 puts parameters aside with the time.

    Args:
        every: optimizer steps between two copies.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.samples = 0
        self.begin = self.end = 0.0
        self.waited: float | None = None
        self.kept: list[tuple[float, dict[str, Tensor]]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The clock begins."""
        dist.barrier()
        self.waited = seconds_without_core()
        self.begin = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count, and keep a copy."""
        self.samples += len(batch[0])
        if dist.get_rank() == 0 and trainer.global_step % self.every == 0:
            copy = {name: tensor.detach().clone() for name, tensor in pl_module.state_dict().items()}
            self.kept.append((time.perf_counter() - self.begin, copy))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The clock ends when the last rank does."""
        dist.barrier()
        self.end = time.perf_counter()
        now = seconds_without_core()
        self.waited = None if now is None or self.waited is None else (now - self.waited) / (self.end - self.begin)


def seconds_without_core() -> float | None:
    """How long the main thread could have run and had no core, by the kernel's count; ``None``: it keeps none."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def train(work: Work, side: Side, delay: str, seed: int, max_steps: int = -1) -> Taken:
    """Train once, on every rank at the same time; what rank 0 returns counts."""
    ranks = dist.get_world_size()
    watch = Watch(work.sync_every)
    rate = work.learning_rate / (ranks if side.steps_alone else 1)
    torch.manual_seed(seed)
    module = DigitsModule(_CHANNELS, _BLOCKS, lambda parameters: AdamW(parameters, lr=rate))
    data = DigitsData(work.micro_batch_size)
    trainer = Trainer(
        **PLAIN_TRAINER,
        accelerator="cpu",
        devices=ranks,
        strategy=make_strategy(side.strategy, **side.options),
        max_epochs=work.epochs,
        max_steps=max_steps,
        limit_val_batches=0,
        callbacks=[Delay(delay, work.milliseconds / 1e3, seed), watch],
        data_seed=seed,
    )
    trainer.fit(module, datamodule=data)
    samples = torch.tensor(watch.samples)
    dist.all_reduce(samples)
    images, classes = data.splits["test"].tensors
    took, final = watch.end - watch.begin, loss_of(module, images, classes)
    reached = took if final <= work.target else None
    for seconds, kept in watch.kept:
        module.load_state_dict(kept)
        if loss_of(module, images, classes) <= work.target:
            reached = seconds
            break
    dist.barrier()  # no rank starts the next training meanwhile
    return Taken(int(samples) / took, reached, final, watch.waited)


@torch.no_grad()
def loss_of(module: DigitsModule, images: Tensor, classes: Tensor) -> float:
    """Mean cross-entropy."""
    return float(cross_entropy(module(images), classes))


def measure(work: Work, names: Sequence[str], delays: Sequence[str], seeds: int) -> dict[str, dict[str, list[Taken]]]:
    """On one rank: under each delay all sides in turns, once per seed."""
    silence_lightning()
    sides = sides_of(work)
    taken = {}
    # Every rank takes the same turns; the first one tells.
    with nullcontext() if dist.get_rank() == 0 else redirect_stderr(io.StringIO()):
        for name in names:
            train(work, sides[name], "none", 0, _WARM_UP_STEPS)
        for delay in delays:
            say_from_first(delay)
            turns = {name: _Turns(work, sides[name], delay) for name in names}
            taken[delay] = alternate(turns, seeds, lambda each: f"{each.samples_per_second:.0f} samples/s")
    return taken


class _Turns:
    """A training with another seed at each call."""

    def __init__(self, work: Work, side: Side, delay: str) -> None:
        self.arguments = work, side, delay
        self.seed = 0

    def __call__(self) -> Taken:
        self.seed += 1
        return train(*self.arguments, self.seed)


def rows_of(taken: Mapping[str, Sequence[Taken]]) -> list[dict[str, Any]]:
    """One row per side, medians with least and most; ratios are of the same seed."""
    rows = []
    for name, each in taken.items():
        to_target = [one.seconds_to_target for one in each if one.seconds_to_target is not None]
        rows.append(
            {
                "side": name,
                "samples_per_second": _spread([one.samples_per_second for one in each], 0),
                "of ddp": _ratio(taken, name, "ddp"),
                "of sync": _ratio(taken, name, "sync"),
                "seconds_to_target": _spread(to_target, 1),
                "reached": f"{len(to_target)} of {len(each)}",
                "final_loss": _spread([one.final_loss for one in each], 3),
                "without a core, %": _most_waited(each),
            }
        )
    return rows


def _spread(values: Sequence[float], digits: int) -> str | None:
    if not values:
        return None
    middle, least, most = (f"{value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({least} to {most})"


def _most_waited(taken: Sequence[Taken]) -> float | None:
    waited = [one.waited for one in taken if one.waited is not None]
    return round(100 * max(waited), 1) if waited else None


def _ratio(taken: Mapping[str, Sequence[Taken]], name: str, other: str) -> float | None:
    if other not in taken:
        return None
    pairs = zip(taken[name], taken[other], strict=True)
    return round(median(one.samples_per_second / another.samples_per_second for one, another in pairs), 2)


def goals_of(taken: Mapping[str, Mapping[str, Sequence[Taken]]]) -> list[Goal]:
    """Those of what was measured."""
    goals = []
    for delay, name, least in (("stalls", "async", LEAST_STALLS), ("slow", "async, leases", LEAST_SLOW)):
        measured = taken.get(delay, {})
        ratio = _ratio(measured, name, "ddp") if name in measured else None
        if ratio is not None:
            goals.append(Goal(f"samples per second of {name} over those of ddp, {delay}", ratio, least, True))
    return goals


def warn_of_load(taken: Mapping[str, Mapping[str, Sequence[Taken]]]) -> None:
    """Say so, if ranks waited for the cores of this machine, which are not what is measured."""
    waited = [one.waited for of_delay in taken.values() for each in of_delay.values() for one in each]
    most = max((each for each in waited if each is not None), default=0.0)
    if most > MOST_WAITED:
        say(
            f"Ranks had no core for up to {most:.0%} of the time, so these figures tell of this machine, not of the "
            "sides. Run it while nothing else runs, with OMP_NUM_THREADS=1, fewer --ranks or more --milliseconds."
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.asynchronous", description=__doc__.split("\n\n")[0])
    names = list(sides_of(Work(1, 1, 1.0, 1, 1, 1.0, 1.0)))
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="how many (default: %(default)s)")
    add("--seeds", type=int, default=3, help="trainings of each side under each delay (default: %(default)s)")
    add("--sides", nargs="+", choices=names, default=names, help="default: all")
    add("--delays", nargs="+", choices=DELAYS, default=list(DELAYS), help="default: all")
    add("--epochs", type=int, default=4, help="of a training (default: %(default)s)")
    add("--micro-batch", type=int, default=8, help="samples of a rank (default: %(default)s)")
    add("--lr", type=float, default=3e-3, help="of AdamW, for gradients of all ranks (default: %(default)s)")
    add("--sync-every", type=int, default=10, help="steps of a replica, local updates (default: %(default)s)")
    add("--staleness", type=int, default=3, help="of ssp (default: %(default)s)")
    add("--milliseconds", type=float, default=16.0, help="of a rank for a step (default: %(default)s)")
    add("--target", type=float, default=0.3, help="loss on the test images (default: %(default)s)")
    options = parser.parse_args()
    if options.ranks < 2 or min(options.seeds, options.epochs, options.micro_batch, options.sync_every) < 1:
        parser.error("--ranks must be at least 2; --seeds, --epochs, --micro-batch and --sync-every at least 1")
    work = Work(
        epochs=options.epochs,
        micro_batch_size=options.micro_batch,
        learning_rate=options.lr,
        sync_every=options.sync_every,
        staleness=options.staleness,
        milliseconds=options.milliseconds,
        target=options.target,
    )
    taken = run_ranks(measure, options.ranks, work, options.sides, options.delays, options.seeds)[0]
    rows = {delay: rows_of(of_delay) for delay, of_delay in taken.items()}
    title = f"{options.ranks} ranks, {options.seeds} seeds, median (least to most), target {work.target:g}, delay: "
    tables = [table_of(title + delay, of_delay) for delay, of_delay in rows.items()]
    warn_of_load(taken)
    finish("asynchronous", tables, goals_of(taken), {"rows": rows})


if __name__ == "__main__":
    main()
