"""Bytes that a rank sends per training step along each axis of a layout, against the minimum of the method.

``CommunicationMeter`` counts, for each collective, the bytes of the best algorithm (mean over the ranks, fp32). Also
shown are the bytes of this backend (gloo all-reduces whole tensors where it could scatter them) and of the kernel.
P = bytes of the parameters, A = bytes of a hidden state (samples x positions x width), L = blocks, n = ranks of the
axis, and s = (n - 1) / n:

==================  ==================================================================================================
ddp                 2 s P: one all-reduce
zero1, zero2        2 s P (arXiv:1910.02054, section 7)
zero3               3 s P (the same); what is outside of the blocks stays gathered between forward and backward: 2 s P
tensor              2 s A (4 L + 2): per block two all-reduces in each direction (arXiv:1909.08053), one after the
                    embedding and one before the head; and three numbers per position for the loss
tensor, sequence    the same, as all-gathers and reduce-scatters (arXiv:2205.05198)
pipeline            2 s A: each boundary passes a hidden state and its gradient
context, ring       L times 3 (n - 1) / n 2 A: keys and values go round twice, their gradient once (arXiv:2310.01889)
context, ulysses    L times 8 s A / n: four all-to-alls in each direction (arXiv:2309.14509)
context, gather     L times 2 (n - 1) / n 2 A: keys and values are gathered, their gradient is scattered
expert              L times 4 A r: tokens and results in each direction, where r is how many other ranks hold one of a
                    token's experts if all experts are equally likely
==================  ==================================================================================================

Context and expert ranks average gradients besides (here by zero1, 2 s P; of experts there is one copy). In hybrids each
axis works on what the others leave. A pipeline with zero3 gathers parameters once a step: 2 s P of its stage.

With ``bf16-mixed`` or ``16-mixed``, of that half as many bytes are sent: weight matrices of blocks where zero3 gathers
them; all of tensor but the all-reduce after the embedding and the numbers for the loss; keys and values that go round.
The rest is fp32: gradients, what zero1 and zero2 gather, hidden states between stages (sums of fp32 and 16 bit), tokens
on their way to experts, and gradients of keys and values, which several ranks add to.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.layouts import Observe
from benchmarks.memory import Ids
from benchmarks.quiet import PLAIN_TRAINER
from benchmarks.ranks import run_ranks, say_from_first
from benchmarks.report import Goal, finish, say, table_of
from trainwright.recipes.gpt.model import GPTConfig
from trainwright.recipes.gpt.module import GPTModule
from trainwright.recipes.moe.model import MoEConfig
from trainwright.recipes.moe.module import MoEModule
from trainwright.strategies.contract.registry import make_strategy
from trainwright.trainer.trainer import Trainer

MOST_ABOVE_FLOOR = 1.05
_FLOAT = 4
HALVES = ("bf16-mixed", "16-mixed")
_OBSERVED_STEP = 3


class Work(NamedTuple):
    """Sizes of the workload, in bytes."""

    matrices: float
    """Parameters that the tensor axis splits."""
    vectors: float
    """Other parameters."""
    outside: float
    """Of the matrices, those outside of the blocks."""
    experts: float
    """Parameters of experts."""
    hidden: float
    """A hidden state of the samples of one data rank."""
    positions: int
    """Samples times positions of one data rank."""
    layers: int
    ranks: int
    remote: float
    """Other ranks that hold one of a token's experts, on average."""
    computed: float
    """Bytes of a number that is computed in the run's precision, as a part of those of fp32."""

    @property
    def dense(self) -> float:
        """Parameters but experts."""
        return self.matrices + self.vectors

    @property
    def rounded(self) -> float:
        """Bytes that matrices of blocks have less in the precision in which products are computed."""
        return (1 - self.computed) * (self.matrices - self.outside)

    @property
    def share(self) -> float:
        """s, with all ranks along the axis."""
        return (self.ranks - 1) / self.ranks


def _tensor(work: Work, ranks: int) -> float:
    share = (ranks - 1) / ranks
    hidden = work.hidden * (1 + work.computed * (4 * work.layers + 1))
    return 2 * share * (hidden + 3 * _FLOAT * work.positions)


def _zero3(work: Work, ranks: int, tensor: int) -> float:
    # The one vector outside of the blocks is a norm's, too small to be told apart.
    return (
        (ranks - 1) / ranks * (3 * (work.matrices / tensor + work.vectors) - (work.outside + 2 * work.rounded) / tensor)
    )


def _tensor_and_zero3(work: Work) -> float:
    half = work.ranks // 2
    return _tensor(work, half) + _zero3(work, 2, half)


def _pipeline_and_zero3(work: Work) -> float:
    stages = work.ranks // 2
    return 2 * (stages - 1) / stages * work.hidden + (2 * work.dense - work.rounded) / 2 / stages


@dataclass(frozen=True)
class Axis:
    """One line of the table.

    Args:
        strategy: its name in the registry.
        options: of the strategy.
        floor: least bytes per rank and step.
        data_ranks: ranks that read different samples, as a part of all.
        moe: whether the model has experts.
    """

    strategy: str
    options: dict[str, Any]
    floor: Callable[[Work], float]
    data_ranks: Callable[[int], int] = lambda ranks: 1
    moe: bool = False


_PIPELINE = {"schedule": "1f1b", "micro_batches": 4}
_LOSS = {"loss_parallel": True}
AXES: dict[str, Axis] = {
    "ddp": Axis("ddp", {}, lambda w: 2 * w.share * w.dense, lambda n: n),
    "zero1": Axis("zero1", {}, lambda w: 2 * w.share * w.dense, lambda n: n),
    "zero2": Axis("zero2", {}, lambda w: 2 * w.share * w.dense, lambda n: n),
    "zero3": Axis("zero3", {}, lambda w: _zero3(w, w.ranks, 1), lambda n: n),
    "tensor": Axis("tensor", _LOSS, lambda w: _tensor(w, w.ranks)),
    "tensor, sequence": Axis("tensor", {**_LOSS, "sequence_parallel": True}, lambda w: _tensor(w, w.ranks)),
    "pipeline": Axis("pipeline", _PIPELINE, lambda w: 2 * w.share * w.hidden),
    "context, ring": Axis(
        "context",
        {"attention": "ring", "stage": 1},
        lambda w: w.share * ((2 + 4 * w.computed) * w.layers * w.hidden + 2 * w.dense),
    ),
    "context, ulysses": Axis(
        "context",
        {"attention": "ulysses", "stage": 1},
        lambda w: w.share * (8 * w.computed * w.layers * w.hidden / w.ranks + 2 * w.dense),
    ),
    "context, gather": Axis(
        "context",
        {"attention": "gather", "stage": 1},
        lambda w: w.share * ((2 + 2 * w.computed) * w.layers * w.hidden + 2 * w.dense),
    ),
    "expert": Axis(
        "expert",
        {"stage": 1},
        lambda w: 4 * w.layers * w.hidden * w.remote + 2 * w.share * w.dense,
        lambda n: n,
        moe=True,
    ),
    "zero3 x tensor 2": Axis("hybrid", {"shard": 2, "tensor": -1, **_LOSS}, _tensor_and_zero3, lambda n: 2),
    "zero3 x pipeline": Axis("hybrid", {"shard": 2, "pipeline": -1, **_PIPELINE}, _pipeline_and_zero3, lambda n: 2),
}


def module_of(axis: Axis, config: GPTConfig) -> GPTModule:
    """The module to train, always with the same weights."""
    torch.manual_seed(0)
    if not axis.moe:
        return GPTModule(config, schedule_steps=10)
    sizes = {name: getattr(config, name) for name in ("layers", "dim", "heads", "seq_len", "tied_head")}
    return MoEModule(MoEConfig(**sizes, experts=8), schedule_steps=10)


def work_of(module: GPTModule, samples: int, ranks: int, precision: str = "32") -> Work:
    """Return the inputs of the formulas; ``samples`` are those of one data rank."""
    config = module.config
    named = dict(module.named_parameters())
    experts = {name for name in named if ".experts." in name}
    dense = {name: p for name, p in named.items() if name not in experts}
    remote = 0.0
    if isinstance(config, MoEConfig):
        elsewhere = comb(config.experts - config.experts // ranks, config.experts_per_token)
        remote = (ranks - 1) * (1 - elsewhere / comb(config.experts, config.experts_per_token))
    return Work(
        matrices=_FLOAT * sum(p.numel() for p in dense.values() if p.ndim >= 2),
        vectors=_FLOAT * sum(p.numel() for p in dense.values() if p.ndim < 2),
        outside=_FLOAT * sum(p.numel() for name, p in dense.items() if p.ndim >= 2 and ".blocks." not in name),
        experts=_FLOAT * sum(named[name].numel() for name in experts),
        hidden=_FLOAT * samples * config.seq_len * config.dim,
        positions=samples * config.seq_len,
        layers=config.layers,
        ranks=ranks,
        remote=remote,
        computed=0.5 if precision in HALVES else 1.0,
    )


def train(axis: Axis, module: GPTModule, samples: int, steps: int, observe: pl.Callback, precision: Any = "32") -> None:
    """Train on this rank, so many samples of a data rank a step, while ``observe`` looks on."""
    ranks = dist.get_world_size()
    options: dict[str, Any] = {
        **PLAIN_TRAINER, "accelerator": "cpu", "devices": ranks, "max_steps": steps, "precision": precision
    }  # fmt: skip
    trainer = Trainer(strategy=make_strategy(axis.strategy, **axis.options), callbacks=[observe], **options)
    rows = Ids(axis.data_ranks(ranks) * samples * steps, module.config.seq_len + 1)
    trainer.fit(module, DataLoader(rows, batch_size=samples))


def measure(name: str, config: GPTConfig, samples: int) -> dict[str, Any]:
    """Train a few steps on this rank and return the row; every rank returns the same.

    Args:
        name: a key of :data:`AXES`.
        config: sizes of the model.
        samples: of one data rank and step.
    """
    axis, ranks = AXES[name], dist.get_world_size()
    module, observe = module_of(axis, config), Observe(_OBSERVED_STEP)
    work = work_of(module, samples, ranks)
    train(axis, module, samples, _OBSERVED_STEP, observe)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, (observe.sent, observe.written))
    by_kind: Counter[str] = Counter()
    by_axis: Counter[str] = Counter()
    for counts, _ in everyone:
        for (mesh_axis, kind), sent in counts.items():
            by_kind[kind] += sent.least / ranks
            by_axis[mesh_axis] += sent.least / ranks
    floor = axis.floor(work)
    backend = sum(sent.bytes for counts, _ in everyone for sent in counts.values()) / ranks
    return {
        "axis": name,
        "n": ranks,
        "sent": round(by_kind.total()),
        "floor": round(floor),
        "ratio": round(by_kind.total() / floor, 4),
        "by_kind": {kind: round(count) for kind, count in sorted(by_kind.items()) if count},
        "by_axis": {mesh_axis: round(count) for mesh_axis, count in sorted(by_axis.items()) if count},
        "backend": round(backend),
        "kernel": round(sum(written for _, written in everyone) / ranks),
    }


def measure_all(names: list[str], config: GPTConfig, samples: int) -> list[dict[str, Any]]:
    """One row per axis; called on every rank."""
    rows = []
    for name in names:
        rows.append(measure(name, config, samples))
        say_from_first(f"{name}: {rows[-1]['ratio']} of the least")
    return rows


def for_people(row: dict[str, Any]) -> dict[str, Any]:
    """The row with bytes as KiB, for the table."""
    kinds = ", ".join(f"{kind} {count / 1024:.0f}" for kind, count in row["by_kind"].items() if count >= 512)
    sizes = {f"{name}_kib": round(row[name] / 1024, 1) for name in ("sent", "floor", "backend", "kernel")}
    return {"axis": row["axis"], "n": row["n"], **sizes, "ratio": row["ratio"], "sent by kind": kinds}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.communication", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="how many, an even number (default: %(default)s)")
    add("--axes", nargs="+", choices=AXES, default=list(AXES), help="default: all")
    add("--layers", type=int, default=4, help="blocks of the model (default: %(default)s)")
    add("--dim", type=int, default=64, help="width of the model (default: %(default)s)")
    add("--seq-len", type=int, default=64, help="positions of a sample (default: %(default)s)")
    add("--samples", type=int, default=4, help="of one data rank and step (default: %(default)s)")
    options = parser.parse_args()
    config = GPTConfig(layers=options.layers, dim=options.dim, heads=4, seq_len=options.seq_len, tied_head=False)
    say(f"{options.ranks} ranks")
    rows = run_ranks(measure_all, options.ranks, options.axes, config, options.samples)[0]
    title = f"KiB sent per rank and step, fp32, {options.samples} x {options.seq_len} positions, width {options.dim}"
    goals = [Goal(f"bytes sent, as a part of the least, {row['axis']}", row["ratio"], MOST_ABOVE_FLOOR) for row in rows]
    finish("communication", [table_of(title, [for_people(row) for row in rows])], goals, {"rows": rows})


if __name__ == "__main__":
    main()
