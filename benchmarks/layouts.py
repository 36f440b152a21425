"""The ``gpt`` recipe under every kind of layout on the same ranks: tokens per second, bytes held and bytes sent.

Two of the layouts have a peer written by hand in plain torch (``benchmarks/peers/plain_layouts.py``): stages driven by
``Schedule1F1B``, and ``fully_shard`` times ``parallelize_module``. Ours and theirs live in the same processes and take
turns, as in :mod:`benchmarks.throughput`. A step has the same number of windows of text under every layout.

First the devices are measured as ``trainwright profile`` does. Seconds of a step are predicted for them, and the order
of layouts whose steps differ clearly is compared with the measured one.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from omegaconf import DictConfig, OmegaConf

from benchmarks.peers.plain_gpt import PlainRun, PlainTraining
from benchmarks.peers.plain_layouts import PipelineByHand, ShardedTensorByHand
from benchmarks.ranks import run_ranks
from benchmarks.report import Goal, finish, say, table_of
from benchmarks.throughput import Piece, Plan, TakeTurns
from trainwright import compose
from trainwright.command.run import prepare
from trainwright.core.run.run_directory import read_config
from trainwright.planning.search import auto
from trainwright.planning.search.planned_config import PlannedConfig
from trainwright.strategies.compose.engine_options import engine_options_of
from trainwright.strategies.compose.world import Surroundings, closed_layout, options_of
from trainwright.strategies.contract.communication.meter import CommunicationMeter, Counts
from trainwright.tools.doctor.examination import DoctorRequest, examine_locally
from trainwright.tools.doctor.profile import profile_of

LEAST_RATIO = 0.95
RANKS = 4
# Part by which the slower of two layouts must take longer than the faster one for their order to count.
MARGIN = 0.5
LEAST_AGREEMENT = 0.9


@dataclass(frozen=True)
class LayoutCase:
    """One line of the table.

    Args:
        axes: of the layout on four ranks; axes that are not named are 1.
        options: further options of the strategy.
        peer: the same written by hand, if there is one: its name in the table, and the class.
    """

    axes: dict[str, int]
    options: dict[str, Any]
    peer: tuple[str, Callable[[PlainRun], PlainTraining]] | None = None

    @property
    def name(self) -> str:
        """Of the layout."""
        words = [f"{axis} {size}" for axis, size in self.axes.items()]
        words += [str(value if not isinstance(value, bool) else key) for key, value in self.options.items() if value]
        return ", ".join(words)

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.axes.get("shard", 1) * self.axes.get("replicate", 1)


def _pipeline_by_hand(run: PlainRun) -> PlainTraining:
    return PipelineByHand(run, MICRO_BATCHES)


MICRO_BATCHES = 8
_1F1B = {"schedule": "1f1b", "micro_batches": MICRO_BATCHES}
CASES: dict[str, LayoutCase] = {
    "zero3": LayoutCase({"shard": 4}, {}),
    "pipeline": LayoutCase({"pipeline": 4}, _1F1B, ("torch Schedule1F1B by hand", _pipeline_by_hand)),
    "tensor": LayoutCase({"tensor": 4}, {}),
    "sequence": LayoutCase({"tensor": 4}, {"sequence_parallel": True}),
    "ring": LayoutCase({"context": 4}, {"attention": "ring"}),
    "ulysses": LayoutCase({"context": 4}, {"attention": "ulysses"}),
    "tensor-shard": LayoutCase({"shard": 2, "tensor": 2}, {}, ("torch FSDP2 x TP by hand", ShardedTensorByHand)),
    "pipeline-shard": LayoutCase({"pipeline": 2, "shard": 2}, {**_1F1B, "micro_batches": 4}),
    "pipeline-tensor": LayoutCase({"pipeline": 2, "tensor": 2}, {**_1F1B, "micro_batches": 4}),
    "context-shard": LayoutCase({"shard": 2, "context": 2}, {"attention": "ring"}),
}


class Observe(pl.Callback):
    """Looks at one step: bytes that this rank sends in it, and bytes that it holds at its end.

    Args:
        step: which one, from 1.

    Attributes:
        held: bytes of parameters, gradients and optimizer state.
        sent: what was sent, by mesh axis and kind of collective.
        written: bytes that this process gave to the kernel meanwhile: to sockets, files and terminals.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.held = 0
        self.sent: Counts = {}
        self.written = 0
        self._meter: CommunicationMeter | None = None

    @property
    def least(self) -> float:
        """Bytes that the best algorithms send for the same collectives."""
        return sum(sent.least for sent in self.sent.values())

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        """Count from here."""
        if trainer.global_step == self.step - 1:
            self._meter = trainer.strategy.measures.measure_communication()  # type: ignore[attr-defined]
            self.written = -written_bytes()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """To here."""
        if self._meter is None:
            return
        self.written += written_bytes()
        self._meter.stop()
        held = trainer.strategy.measures.held_bytes()  # type: ignore[attr-defined]
        self.sent, self.held = self._meter.take(), held.total
        self._meter = None


def written_bytes() -> int:
    """Bytes given to ``write`` and its kin by all threads of this process since it began."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def configure(case: LayoutCase, options: argparse.Namespace, plan: Plan, run_dir: str) -> DictConfig:
    """Compose and check the configuration of ``trainwright fit recipe=gpt`` and write it to ``run_dir``."""
    overrides = [
        "strategy=hybrid",
        *[f"strategy.{axis}={size}" for axis, size in {"shard": 1, **case.axes}.items()],
        *[f"strategy.{name}={str(value).lower()}" for name, value in case.options.items()],
        f"size={options.size}",
        f"devices={RANKS}",
        f"accelerator={'gpu' if options.device == 'cuda' else 'cpu'}",
        f"precision={options.precision}",
        f"micro_batch_size={options.batch // case.data_ranks}",
        f"global_batch_size={options.batch}",
        f"max_steps={plan.total + 1}",
        f"run_dir={run_dir}",
        f"trainer.log_every_n_steps={plan.steps}",
        "checkpoint=none",
        "monitor.progress_bar=null",
        "monitor.start_summary=null",
        "callbacks.sample=null",
        "trainer.limit_val_batches=0",
        *([f"data.path={options.data}"] if options.data else []),
    ]
    return prepare(compose("gpt", overrides), "fit")


def measure(run_dir: str, name: str, plan: Plan) -> dict[str, Any]:
    """Train with both sides in turns on this rank.

    Returns:
        Seconds of each piece of ``ours`` and ``by_hand`` (of the slowest rank), last losses, bytes held and sent.
    """
    from trainwright.launch.worker import build_trainer

    cfg, case = read_config(Path(run_dir)), CASES[name]
    device = torch.device("cuda", torch.cuda.current_device()) if cfg.accelerator == "gpu" else torch.device("cpu")
    module = instantiate(cfg.module, _convert_="all")
    run = PlainRun(
        module.config,
        "zero3",
        cfg.micro_batch_size,
        1,
        plan.total,
        device,
        autocast=cfg.precision == "bf16-mixed",
        clip=cfg.trainer.gradient_clip_val,
        path=cfg.data.path,
    )
    other = cast(PlainTraining, _Nobody(run)) if case.peer is None else case.peer[1](run)
    turns, observe = TakeTurns(other, plan), Observe(plan.total + 1)
    seed_everything(cfg.seed, workers=True, verbose=False)
    trainer = build_trainer(cfg)
    trainer.callbacks += [turns, observe]  # type: ignore[attr-defined]
    trainer.fit(module, datamodule=instantiate(cfg.data, _convert_="all"))
    loss = other.loss.detach().clone()
    dist.broadcast(loss, dist.get_world_size() - 1)  # the last stage by hand is the only one that has it
    return {
        "ours": turns.ours,
        "by_hand": turns.by_hand,
        "our_loss": round(turns.our_loss, 3),
        "loss_by_hand": round(float(loss), 3),
        "held": observe.held,
        "sent": observe.least,
        "tokens": plan.steps * cfg.global_batch_size * module.config.seq_len,
        "steps": plan.steps,
    }


class _Nobody(SimpleNamespace):
    """Takes no time in its turns."""

    def __init__(self, run: PlainRun) -> None:
        super().__init__(run=run, loss=torch.zeros((), device=run.device))

    def train(self, steps: int) -> None:
        """Nothing."""


def distinct_pairs(rows: Sequence[Mapping[str, Any]], margin: float = MARGIN) -> list[tuple[str, str, bool]]:
    """Return pairs of layouts whose measured steps differ clearly: faster, slower, and whether that was predicted.

    Args:
        rows: with ``side``, ``best_s`` and ``predicted_s``, seconds of a step; those without a prediction do not count.
        margin: part by which the slower must take longer.
    """
    known = [row for row in rows if row.get("predicted_s") is not None]
    return [
        (fast["side"], slow["side"], fast["predicted_s"] < slow["predicted_s"])
        for fast in known
        for slow in known
        if slow["best_s"] > (1 + margin) * fast["best_s"]
    ]


def predicted_seconds(name: str, options: argparse.Namespace, profile: Mapping[str, Any]) -> float:
    """Of a step of one layout, by the planner."""
    with tempfile.TemporaryDirectory(prefix="trainwright-benchmark-") as folder:
        cfg = configure(CASES[name], options, Plan(1, 1, 1), folder)
    plain = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    cfg = auto._on_this_machine({**plain, "device": dict(profile)})
    layout = closed_layout(cfg, Surroundings())
    assert layout is not None
    searched, engine = PlannedConfig(cfg), engine_options_of(options_of(cfg.strategy))
    parts = engine.micro_batches_for(layout.pipeline) if layout.pipeline > 1 else 1
    rounds = cfg.global_batch_size // (layout.data_ranks * cfg.micro_batch_size)
    work = auto._work(cfg.strategy, engine, layout, cfg.micro_batch_size, rounds, parts)
    cut = auto._cut(engine, layout, cfg.strategy.get("activation_checkpointing", "none"))
    return searched.time_of(work, searched.facts.of(cut)).total


def measured_profile(options: argparse.Namespace) -> dict[str, Any]:
    """Values of the group ``device`` for this machine and :data:`RANKS`, which may be more than it has cores.

    Raises:
        RuntimeError: if ranks failed.
    """
    wish = DoctorRequest(RANKS, "gpu" if options.device == "cuda" else "cpu", threads=options.threads, figures=True)
    seen = examine_locally(wish)
    failed = [each.failure for each in seen.results if each.failure is not None]
    if failed or not seen.results:
        raise RuntimeError(f"the devices could not be measured: {failed}")
    return profile_of(seen, "mine")[0]


def compare(name: str, options: argparse.Namespace, plan: Plan) -> list[dict[str, Any]]:
    """The rows of one layout: by hand, if there is a peer, and ours."""
    with tempfile.TemporaryDirectory(prefix="trainwright-benchmark-") as folder:
        configure(CASES[name], options, plan, folder)
        backend = "nccl" if options.device == "cuda" else "gloo"
        results = run_ranks(measure, RANKS, folder, name, plan, threads=options.threads, backend=backend)
    return rows_of(CASES[name], results)


def rows_of(case: LayoutCase, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens per second of both sides and the ratio, medians over the pieces; bytes of the ranks."""
    first = results[0]
    ours, by_hand = first["ours"], first["by_hand"]
    ours_row = {
        "side": f"trainwright {case.name}",
        "tokens_per_s": round(first["tokens"] / median(piece.wall for piece in ours)),
        "best_s": round(min(piece.wall for piece in ours) / first["steps"], 4),
        "predicted_s": None,
        "ratio": None,
        "cpu_ratio": None,
        "held_kib": round(max(result["held"] for result in results) / 1024),
        "sent_kib": round(mean(result["sent"] for result in results) / 1024),
        "last_loss": first["our_loss"],
    }
    if case.peer is None:
        return [ours_row]
    around = [Piece(*map(mean, zip(*pair, strict=True))) for pair in zip(by_hand, by_hand[1:], strict=False)]
    pairs = list(zip(ours, around, strict=True))
    ours_row["ratio"] = round(median(hand.wall / own.wall for own, hand in pairs), 4)
    ours_row["cpu_ratio"] = round(median(hand.cpu / own.cpu for own, hand in pairs), 4)
    hand_row = {
        **dict.fromkeys(ours_row),
        "side": case.peer[0],
        "tokens_per_s": round(first["tokens"] / median(piece.wall for piece in around)),
        "last_loss": first["loss_by_hand"],
    }
    return [hand_row, ours_row]


def main() -> None:
    """Measure and print."""
    has_gpus = torch.cuda.device_count() >= RANKS
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layouts", description=__doc__)
    add = parser.add_argument
    add("--size", default="nano", help="size of the model, as in trainwright fit size=... (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if has_gpus else "cpu", help="default: %(default)s here")
    add("--precision", choices=("32", "bf16-mixed"), default="bf16-mixed" if has_gpus else "32")
    add("--layouts", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    add("--batch", type=int, default=16, help="windows per step over all ranks (default: %(default)s)")
    add("--threads", type=int, default=1, help="CPU threads of a rank (default: %(default)s)")
    add("--data", help="a text file or folder (default: the standard library's source)")
    add("--rounds", type=int, default=8, help="pieces of ours (default: %(default)s)")
    add("--steps", type=int, default=5, help="optimizer steps of a piece (default: %(default)s)")
    add("--warm-up", type=int, default=3, help="optimizer steps before (default: %(default)s)")
    options = parser.parse_args()
    plan = Plan(options.rounds, options.steps, options.warm_up)
    say("what the devices can do")
    profile = measured_profile(options)
    rows: list[dict[str, Any]] = []
    for name in options.layouts:
        say(f"{CASES[name].name} on {RANKS} ranks")
        found = compare(name, options, plan)
        found[-1]["predicted_s"] = round(predicted_seconds(name, options, profile), 4)
        rows += [{**row, "layout": name} for row in found]
    goals = [Goal(f"ratio of {row['side']}", row["ratio"], LEAST_RATIO, at_least=True) for row in rows if row["ratio"]]
    pairs = distinct_pairs(rows)
    if pairs:
        part = sum(agrees for _, _, agrees in pairs) / len(pairs)
        name = f"part of the {len(pairs)} pairs over {100 * MARGIN:.0f} % apart that are predicted in order"
        goals.append(Goal(name, part, LEAST_AGREEMENT, at_least=True))
        for fast, slow, agrees in pairs:
            if not agrees:
                say(f"predicted the other way round: {fast} is faster than {slow}")
    title = f"gpt {options.size}, {options.precision}, {options.device}; {RANKS} ranks, {options.batch} windows a step"
    finish("layouts", [table_of(title, rows)], goals, {"options": vars(options), "profile": profile, "rows": rows})


if __name__ == "__main__":
    main()
