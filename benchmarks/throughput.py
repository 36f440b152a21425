"""Tokens per second of the ``gpt`` recipe, against the same training written by hand in plain torch.

One process: a bare loop. Two: ``DistributedDataParallel`` against ``strategy=ddp``, and FSDP2 (``fully_shard`` per
block) against ``strategy=zero3``. Ours runs as ``trainwright fit recipe=gpt`` does, with its loggers, and its monitors
but for those that write to the terminal.

Both sides live in the same processes and take turns: our Trainer makes a number of steps and hands over to the loop
written by hand, which makes as many while the Trainer is paused. Each of our pieces is compared with the mean of the
two hand-written pieces around it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from omegaconf import DictConfig

from benchmarks.flops import model_flops_utilization
from benchmarks.peers.plain_gpt import Kind, PlainRun, PlainTraining
from benchmarks.ranks import run_ranks, say_from_first
from benchmarks.report import Goal, finish, say, table_of
from trainwright import compose
from trainwright.command.run import prepare
from trainwright.core.run.run_directory import read_config
from trainwright.recipes.gpt.model import GPT

LEAST_RATIO = 0.98
_BY_HAND = {"single": "bare loop", "ddp": "torch DDP by hand", "zero3": "torch FSDP2 by hand"}


@dataclass(frozen=True)
class Plan:
    """How long is measured.

    Args:
        rounds: pieces of ours; there is one more by hand.
        steps: optimizer steps of a piece.
        warm_up: optimizer steps of each side before the first piece.
    """

    rounds: int = 12
    steps: int = 25
    warm_up: int = 10

    @property
    def total(self) -> int:
        """Optimizer steps of ours."""
        return self.warm_up + self.rounds * self.steps


class Piece(NamedTuple):
    """Seconds that a piece took, on the slowest rank."""

    wall: float
    """On the clock."""
    cpu: float
    """CPU time of the process; on a busy machine it leaves out what other processes took."""


class TakeTurns(pl.Callback):
    """Measures pieces of the training that it watches, and lets the other side run in between.

    Args:
        other: the training written by hand.
        plan: lengths.
    """

    def __init__(self, other: PlainTraining, plan: Plan) -> None:
        self.other = other
        self.plan = plan
        self.ours: list[Piece] = []
        self.by_hand: list[Piece] = []
        self.our_loss = 0.0
        self._next = plan.warm_up
        self._begin = Piece(0.0, 0.0)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At the end of a piece, hand over."""
        if trainer.global_step < self._next:
            return
        if self._next == self.plan.warm_up:
            with torch.enable_grad():
                self.other.train(self.plan.warm_up)
        else:
            self.ours.append(self._since(self._begin))
            self.our_loss = float(outputs["loss"]) * trainer.accumulate_grad_batches
        begin = self._start()
        with torch.enable_grad():
            self.other.train(self.plan.steps)
        self.by_hand.append(self._since(begin))
        say_from_first(f"piece {len(self.by_hand)}/{self.plan.rounds + 1}")
        self._next += self.plan.steps
        self._begin = self._start()

    def _start(self) -> Piece:
        self._wait()
        if dist.is_initialized():
            dist.barrier()
        return Piece(time.perf_counter(), time.process_time())

    def _since(self, begin: Piece) -> Piece:
        self._wait()
        wall, cpu = time.perf_counter() - begin.wall, time.process_time() - begin.cpu
        seconds = torch.tensor([wall, cpu], device=self.other.run.device, dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return Piece(*seconds.tolist())

    def _wait(self) -> None:
        if self.other.run.device.type == "cuda":
            torch.cuda.synchronize()


def configure(kind: Kind, ranks: int, options: argparse.Namespace, plan: Plan, run_dir: str) -> DictConfig:
    """Compose and check the configuration of ``trainwright fit recipe=gpt`` and write it to ``run_dir``."""
    overrides = [
        f"strategy={kind}",
        f"size={options.size}",
        f"devices={ranks}",
        f"accelerator={'gpu' if options.device == 'cuda' else 'cpu'}",
        f"precision={options.precision}",
        f"micro_batch_size={options.micro_batch}",
        f"global_batch_size={options.micro_batch * options.accumulation * ranks}",
        f"max_steps={plan.total}",
        f"run_dir={run_dir}",
        f"trainer.log_every_n_steps={plan.steps}",  # so that every piece pays for it once
        "checkpoint=none",
        "monitor.progress_bar=null",  # these two would write between the lines of this benchmark
        "monitor.start_summary=null",
        "callbacks.sample=null",
        "trainer.limit_val_batches=0",
        *([f"data.path={options.data}"] if options.data else []),
    ]
    return prepare(compose("gpt", overrides), "fit")


def measure(run_dir: str, kind: Kind, plan: Plan) -> dict[str, Any]:
    """Train with both sides in turns on this rank.

    Returns:
        Seconds of each piece of ``ours`` and ``by_hand`` (of the slowest rank), tokens of a piece, last losses.
    """
    from trainwright.launch.worker import build_trainer

    cfg = read_config(Path(run_dir))
    ranks = int(cfg.devices)
    device = torch.device("cuda", torch.cuda.current_device()) if cfg.accelerator == "gpu" else torch.device("cpu")
    module = instantiate(cfg.module, _convert_="all")
    accumulation = cfg.global_batch_size // (cfg.micro_batch_size * ranks)
    other = PlainTraining(
        PlainRun(
            module.config,
            kind,
            cfg.micro_batch_size,
            accumulation,
            plan.total,
            device,
            autocast=cfg.precision == "bf16-mixed",
            clip=cfg.trainer.gradient_clip_val,
            path=cfg.data.path,
        )
    )
    turns = TakeTurns(other, plan)
    seed_everything(cfg.seed, workers=True, verbose=False)
    trainer = build_trainer(cfg)
    trainer.callbacks.append(turns)  # type: ignore[attr-defined]
    trainer.fit(module, datamodule=instantiate(cfg.data, _convert_="all"))
    return {
        "ours": turns.ours,
        "by_hand": turns.by_hand,
        "tokens": plan.steps * cfg.global_batch_size * module.config.seq_len,
        "our_loss": round(turns.our_loss, 3),
        "loss_by_hand": round(float(other.loss), 3),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }


def compare(kind: Kind, ranks: int, options: argparse.Namespace, plan: Plan) -> list[dict[str, Any]]:
    """The two rows of one comparison, by hand and ours."""
    with tempfile.TemporaryDirectory(prefix="trainwright-benchmark-") as folder:
        cfg = configure(kind, ranks, options, plan, folder)
        backend = None if ranks == 1 else "nccl" if options.device == "cuda" else "gloo"
        results = run_ranks(measure, ranks, folder, kind, plan, threads=options.threads, backend=backend)
    return rows_of(kind, ranks, results[0], GPT(instantiate(cfg.module.config)))


def rows_of(kind: Kind, ranks: int, measured: dict[str, Any], model: GPT) -> list[dict[str, Any]]:
    """Tokens per second of both sides and the ratio, medians over the pieces; on a GPU the MFU too."""
    ours, by_hand = measured["ours"], measured["by_hand"]
    around = [Piece(*map(mean, zip(*pair, strict=True))) for pair in zip(by_hand, by_hand[1:], strict=False)]
    ratios = [hand.wall / own.wall for own, hand in zip(ours, around, strict=True)]
    cpu_ratios = [hand.cpu / own.cpu for own, hand in zip(ours, around, strict=True)]
    compared = {
        "ratio": round(median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "cpu_ratio": round(median(cpu_ratios), 4),
    }
    return [
        _row(ranks, _BY_HAND[kind], around, dict.fromkeys(compared), measured["loss_by_hand"], measured, model),
        _row(ranks, f"trainwright {kind}", ours, compared, measured["our_loss"], measured, model),
    ]


def _row(
    ranks: int,
    side: str,
    pieces: list[Piece],
    compared: Mapping[str, float | None],
    loss: float,
    measured: dict[str, Any],
    model: GPT,
) -> dict[str, Any]:
    rate = measured["tokens"] / median(piece.wall for piece in pieces)
    row = {"processes": ranks, "side": side, "tokens_per_s": round(rate), **compared, "last_loss": loss}
    if measured["device"] != "cpu":
        used = model_flops_utilization(model, rate, measured["device"], ranks)
        row["mfu"] = None if used is None else round(used, 4)
    return row


def cases(options: argparse.Namespace) -> list[tuple[Kind, int]]:
    """Comparisons that this machine can make."""
    ranks = options.processes
    wanted: list[tuple[Kind, int]] = [("single", 1), ("ddp", ranks), ("zero3", ranks)]
    chosen = [case for case in wanted if case[0] in options.strategies]
    if options.device == "cuda" and ranks > torch.cuda.device_count():
        say(f"{ranks} processes need as many GPUs, here there are {torch.cuda.device_count()}: one process only")
        chosen = [case for case in chosen if case[1] == 1]
    return chosen


def main() -> None:
    """Measure and print."""
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__)
    add = parser.add_argument
    add("--size", default="nano", help="size of the model, as in trainwright fit size=... (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu", help="default: %(default)s here")
    add("--precision", choices=("32", "bf16-mixed"), default="bf16-mixed" if has_gpu else "32")
    add("--processes", type=int, default=2, help="ranks of ddp and zero3 (default: %(default)s)")
    add("--strategies", nargs="+", choices=_BY_HAND, default=list(_BY_HAND), help="default: all")
    add("--micro-batch", type=int, default=4, help="windows per forward and rank (default: %(default)s)")
    add("--accumulation", type=int, default=1, help="micro-batches per optimizer step (default: %(default)s)")
    add(
        "--threads",
        type=int,
        default=1,
        help="CPU threads of a rank (default: %(default)s; more want a free machine)",
    )
    add("--data", help="a text file or folder (default: the standard library's source)")
    add("--rounds", type=int, default=Plan.rounds, help="pieces of ours (default: %(default)s)")
    add("--steps", type=int, default=Plan.steps, help="optimizer steps of a piece (default: %(default)s)")
    add("--warm-up", type=int, default=Plan.warm_up, help="optimizer steps before (default: %(default)s)")
    options = parser.parse_args()
    plan = Plan(options.rounds, options.steps, options.warm_up)
    rows: list[dict[str, Any]] = []
    for kind, ranks in cases(options):
        say(f"{_BY_HAND[kind]} against trainwright, {ranks} process(es)")
        rows += compare(kind, ranks, options, plan)
    goals = [Goal(f"ratio of {row['side']}", row["ratio"], LEAST_RATIO, at_least=True) for row in rows if row["ratio"]]
    title = f"gpt {options.size}, {options.precision}, {options.device}; medians of {plan.rounds} x {plan.steps} steps"
    finish("throughput", [table_of(title, rows)], goals, {"options": vars(options), "rows": rows})


if __name__ == "__main__":
    main()
