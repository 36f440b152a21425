"""Idle time of pipeline ranks under every schedule, against the formulas.

Blocks sleep instead of computing: fixed times for forward, for the gradient of the input and for the gradient of the
weight, each in its own autograd node, so that the machine's cores hardly matter. A rank is busy while one of its blocks
sleeps and while it uses the CPU (the user's step around the blocks, autograd, messages); otherwise it idles.

With p ranks, m micro-batches and v stages per rank, idle time as a part of busy time is (p - 1) / m for gpipe and 1f1b
(arXiv:1811.06965, 2104.04473), (p - 1) / (v m) for interleaved_1f1b and looped_bfs. For the others, which compute
gradients of inputs and of weights apart (arXiv:2401.10241), it is what the order of their work gives when messages take
no time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.quiet import PLAIN_TRAINER
from benchmarks.ranks import run_ranks, say_from_first
from benchmarks.report import Goal, finish, say, table_of
from trainwright.strategies.contract.registry import make_strategy
from trainwright.strategies.pipeline.schedules import CHOICES
from trainwright.trainer.trainer import Trainer

MOST_ABOVE_THEORY = 1.10
LEAST_GAIN = 0.15
_WIDTH = 4


@dataclass(frozen=True)
class Waits:
    """Seconds that a block waits.

    Args:
        forward: in its forward.
        input: for the gradient of its input.
        weight: for the gradient of its weight.
    """

    forward: float
    input: float
    weight: float

    @property
    def whole(self) -> float:
        """Of one block and micro-batch."""
        return self.forward + self.input + self.weight


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Args:
        schedule: its name.
        stages_per_rank: v.
    """

    schedule: str
    stages_per_rank: int

    def theory(self, ranks: int, micro_batches: int) -> float | None:
        """Idle time as a part of busy time by the formula; ``None``: there is none that holds for any waits."""
        if CHOICES[self.schedule].splits_backward:
            return None
        return (ranks - 1) / (self.stages_per_rank * micro_batches)


CASES = (
    Case("gpipe", 1),
    Case("1f1b", 1),
    Case("interleaved_1f1b", 2),
    Case("looped_bfs", 2),
    Case("interleaved_zero_bubble", 1),
    Case("interleaved_zero_bubble", 2),
    Case("zbv", 2),
    Case("dualpipev", 2),
)


class Clock:
    """Seconds that this process has waited in blocks since it was last asked.

    Attributes:
        runs: whether blocks wait at all.
    """

    def __init__(self) -> None:
        self.runs = True
        self._busy = 0.0

    def wait(self, seconds: float) -> None:
        """Wait; what the machine adds to it counts as waited."""
        if not self.runs:
            return
        begin = time.perf_counter()
        time.sleep(seconds)
        self._busy += time.perf_counter() - begin

    def take(self) -> float:
        """The seconds; counting begins anew."""
        busy, self._busy = self._busy, 0.0
        return busy


clock = Clock()


class _OnInput(torch.autograd.Function):
    """Passes the hidden state on; its backward is what the gradient of the input costs."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, waits: Waits) -> Tensor:
        ctx.seconds = waits.input
        clock.wait(waits.forward)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        clock.wait(ctx.seconds)
        return gradients[0], None


class _OnWeight(torch.autograd.Function):
    """Passes the weight on; its backward is what the gradient of the weight costs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, waits: Waits) -> Tensor:
        ctx.seconds = waits.weight
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        clock.wait(ctx.seconds)
        return gradients[0], None


class WaitingBlock(nn.Module):
    """Adds its weight to the hidden state, slowly."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits
        self.weight = nn.Parameter(torch.zeros(_WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        """``(samples, 4)`` to ``(samples, 4)``."""
        out: Tensor = _OnInput.apply(hidden, self.waits) + _OnWeight.apply(self.weight, self.waits)
        return out


class WaitingModel(pl.LightningModule):
    """Blocks between a layer that makes the first hidden state and one that makes the loss."""

    def __init__(self, blocks: int, waits: Waits) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(WaitingBlock(waits) for _ in range(blocks))
        self.last = nn.Linear(_WIDTH, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Any loss."""
        hidden = self.first(batch)
        for block in self.blocks:
            hidden = block(hidden)
        loss: Tensor = self.last(hidden).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Samples(Dataset[Tensor]):
    """Rows of ones."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(_WIDTH)


class Step(NamedTuple):
    """One optimizer step, seconds."""

    wall: float
    """From a barrier to the end of the optimizer's step on the slowest rank."""
    busy: float
    """Waited in blocks by this rank."""
    cpu: float
    """CPU time of this rank: messages, autograd, the user's step around the blocks."""


class Stopwatch(pl.Callback):
    """Callback that times every step but the first, which builds schedules and exchanges shapes."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._begin = self._cpu = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        """Begin together."""
        clock.runs = trainer.global_step > 0
        dist.barrier()
        clock.take()
        self._begin, self._cpu = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Of the step, the slowest rank counts."""
        cpu = time.process_time() - self._cpu
        wall = torch.tensor(time.perf_counter() - self._begin, dtype=torch.float64)
        dist.all_reduce(wall, op=dist.ReduceOp.MAX)
        if trainer.global_step > 1:
            self.steps.append(Step(wall.item(), clock.take(), cpu))


def train(case: Case, blocks: int, micro_batches: int, waits: Waits, steps: int) -> list[Step]:
    """Train ``steps`` steps on this rank, and one before."""
    watch = Stopwatch()
    strategy = make_strategy(
        "pipeline",
        schedule=case.schedule,
        micro_batches=micro_batches,
        stages_per_rank=case.stages_per_rank,
        blocks=["blocks.*"],
    )
    options: dict[str, Any] = {
        **PLAIN_TRAINER,
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "max_steps": steps + 1,
    }
    trainer = Trainer(strategy=strategy, callbacks=[watch], **options)
    samples = Samples((steps + 1) * micro_batches)
    trainer.fit(WaitingModel(blocks, waits), DataLoader(samples, batch_size=micro_batches))
    return watch.steps


class Measured(NamedTuple):
    """The shortest step of one case: its length is known beforehand, and whatever else the machine does only adds."""

    wall: float
    """Seconds of the step."""
    idle: float
    """Idle time as a fraction of busy time, over all ranks."""
    cpu: float
    """Seconds of CPU time, mean of the ranks."""


def measure(cases: Sequence[Case], micro_batches: int, waits: Waits, rounds: int, steps: int) -> list[Measured]:
    """Measure every case, in turns; called on every rank."""
    ranks = dist.get_world_size()
    blocks = ranks * max(case.stages_per_rank for case in cases)
    found: dict[Case, list[Measured]] = {case: [] for case in cases}
    for turn in range(rounds):
        first = turn % len(cases)
        for case in (*cases[first:], *cases[:first]):
            everyone: list[Any] = [None] * ranks
            dist.all_gather_object(everyone, train(case, blocks, micro_batches, waits, steps))
            for step in zip(*everyone, strict=True):
                wall, cpu = step[0].wall, mean(rank.cpu for rank in step)
                busy = cpu + mean(rank.busy for rank in step)
                found[case].append(Measured(wall, wall / busy - 1, cpu))
            say_from_first(f"{case.schedule} v={case.stages_per_rank}: idle {found[case][-1].idle:.3f} of busy time")
    return [min(taken) for taken in found.values()]


# ---- what the order of the work alone gives --------------------------------------------------------------------------


def orders_of(case: Case, ranks: int, micro_batches: int) -> dict[int, list[tuple[str, int, int]]]:
    """Return the actions of each rank in order: kind (``F``, ``B``, ``I``, ``W``), stage, micro-batch."""
    if case.schedule in ("gpipe", "1f1b"):  # torch writes these two as loops
        return {rank: _plain_order(case.schedule, rank, ranks, micro_batches) for rank in range(ranks)}
    place = _Place(ranks, ranks * case.stages_per_rank)
    schedule: Any = CHOICES[case.schedule].load()
    made = schedule(
        [place] * case.stages_per_rank,
        n_microbatches=micro_batches,
        loss_fn=lambda output, target: output,
        scale_grads=False,
    )
    order = made.pipeline_order
    return {rank: [work for action in order[rank] if action for work in _flat(action)] for rank in range(ranks)}


def _plain_order(schedule: str, rank: int, ranks: int, micro_batches: int) -> list[tuple[str, int, int]]:
    ahead = micro_batches if schedule == "gpipe" else min(ranks - rank, micro_batches)
    order = [("F", rank, part) for part in range(ahead)]
    for part in range(micro_batches):
        order.append(("B", rank, part))
        if part + ahead < micro_batches:
            order.append(("F", rank, part + ahead))
    return order


def _flat(action: Any) -> Iterable[tuple[str, int, int]]:
    for one in action.sub_actions or (action,):
        if one.computation_type.value in "FBIW":
            yield one.computation_type.value, one.stage_index, one.microbatch_index


class _Place:
    """Minimal stage with the attributes that torch's schedules read in their constructors."""

    has_backward = True
    group_rank = stage_index = 0
    submod = nn.Identity()

    def __init__(self, ranks: int, stages: int) -> None:
        self.group_size, self.num_stages = ranks, stages
        self.stage_index_to_group_rank: dict[int, int] = {}


def idle_share(order: Mapping[int, Sequence[tuple[str, int, int]]], stages: int, waits: Waits) -> float:
    """Idle time as a part of busy time if messages take no time.

    Args:
        order: of the work of each rank, as :func:`orders_of` gives it.
        stages: of all ranks.
        waits: of one stage.
    """
    ends: dict[tuple[str, int, int], float] = {}
    at, clocks, busy = dict.fromkeys(order, 0), dict.fromkeys(order, 0.0), dict.fromkeys(order, 0.0)
    while any(at[rank] < len(order[rank]) for rank in order):
        moved = False
        for rank, works in order.items():
            while at[rank] < len(works) and (ready := _ready(works[at[rank]], stages, ends)) is not None:
                seconds = _seconds(works[at[rank]], waits)
                clocks[rank] = max(clocks[rank], ready) + seconds
                busy[rank] += seconds
                ends[works[at[rank]]] = clocks[rank]
                at[rank] += 1
                moved = True
        if not moved:
            raise RuntimeError(f"The order of the schedule waits in a circle: {[order[r][at[r]] for r in order]}")
    return max(clocks.values()) / mean(busy.values()) - 1


def _ready(work: tuple[str, int, int], stages: int, ends: Mapping[tuple[str, int, int], float]) -> float | None:
    """When ``work`` can begin; ``None``: not known yet."""
    kind, stage, part = work
    if kind == "F":
        return 0.0 if stage == 0 else ends.get(("F", stage - 1, part))
    if kind == "W":
        return ends.get(("I", stage, part))
    if stage == stages - 1:
        return ends.get(("F", stage, part))
    return ends.get(("I", stage + 1, part), ends.get(("B", stage + 1, part)))


def _seconds(work: tuple[str, int, int], waits: Waits) -> float:
    kind, stage, _ = work
    if kind == "F":
        return waits.forward
    if kind == "B":
        return waits.input + waits.weight
    if stage == 0:  # no rank needs the gradient of the first input, so that stage's whole backward comes later
        return waits.input + waits.weight if kind == "W" else 0.0
    return waits.input if kind == "I" else waits.weight


# ---- the table -------------------------------------------------------------------------------------------------------


def rows_of(
    cases: Sequence[Case], ranks: int, micro_batches: int, waits: Waits, measured: Sequence[Measured]
) -> list[dict[str, Any]]:
    """One row per case."""
    rows = []
    most = max(case.stages_per_rank for case in cases)
    walls = {case.schedule: found.wall for case, found in zip(cases, measured, strict=True)}
    for case, found in zip(cases, measured, strict=True):
        blocks = most // case.stages_per_rank
        stage = Waits(waits.forward * blocks, waits.input * blocks, waits.weight * blocks)
        order = idle_share(orders_of(case, ranks, micro_batches), ranks * case.stages_per_rank, stage)
        formula = case.theory(ranks, micro_batches)
        expected = order if formula is None else formula
        rows.append(
            {
                "p": ranks,
                "schedule": case.schedule,
                "v": case.stages_per_rank,
                "ms": round(found.wall * 1e3, 1),
                "cpu_ms": round(found.cpu * 1e3, 1),
                "idle": round(found.idle, 4),
                "formula": None if formula is None else round(formula, 4),
                "order": round(order, 4),
                "ratio": round(found.idle / expected, 3) if expected > 1e-9 else None,
                "saved": round(1 - found.wall / walls["1f1b"], 3) if "1f1b" in walls else None,
            }
        )
    return rows


def goals_of(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Idle time near the formula where there is one, and a zero-bubble schedule shorter than 1F1B on four ranks."""
    goals = []
    for row in rows:
        name = f"{row['schedule']}, {row['p']} ranks"
        if row["formula"]:
            goals.append(Goal(f"idle time as a part of the formula's, {name}", row["ratio"], MOST_ABOVE_THEORY))
        is_same = row["schedule"] == "interleaved_zero_bubble" and row["v"] == 1
        if is_same and row["p"] >= 4 and row["saved"] is not None:  # with 2 ranks all of 1F1B's idle time is 11 %
            goals.append(Goal(f"part of 1f1b's step saved on the same stages, {name}", row["saved"], LEAST_GAIN, True))
    return goals


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4], help="pipeline ranks (default: 2 4)")
    add("--micro-batches", type=int, default=8, help="parts of a batch (default: %(default)s)")
    add("--unit", type=float, default=40.0, help="ms a block waits for each of its three works (default: %(default)s)")
    add("--schedules", nargs="+", choices=CHOICES, default=list(CHOICES), help="default: all")
    add("--rounds", type=int, default=1, help="times that each schedule has its turn (default: %(default)s)")
    add("--steps", type=int, default=4, help="measured steps of a turn (default: %(default)s)")
    options = parser.parse_args()
    waits = Waits(*[options.unit / 1e3] * 3)
    cases = [case for case in CASES if case.schedule in options.schedules]
    rows: list[dict[str, Any]] = []
    for ranks in options.ranks:
        say(f"{ranks} ranks, {options.micro_batches} micro-batches")
        measured = run_ranks(measure, ranks, cases, options.micro_batches, waits, options.rounds, options.steps)[0]
        rows += rows_of(cases, ranks, options.micro_batches, waits, measured)
    title = f"Pipelines of waiting blocks, m = {options.micro_batches}: idle time as a part of busy time"
    finish("pipeline", [table_of(title, rows)], goals_of(rows), {"options": vars(options), "rows": rows})


if __name__ == "__main__":
    main()
