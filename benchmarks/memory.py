"""Bytes held by one rank under DDP and the three stages of ZeRO, against the formulas of the ZeRO paper.

fp32 and AdamW; P = parameters, N = ranks: 16 P for DDP, 8 P + 8 P / N for stage 1, 4 P + 12 P / N for stage 2 and
16 P / N for stage 3 (arXiv:1910.02054, section 5, with 4 + 4 + 8 bytes per parameter).

Held state is sampled at every phase of a step and its peak compared with the formula. Temporary memory has columns of
its own: parameters gathered by stage 3, and the peak of all tensors, including buckets in flight and activations
(negligible, because the batch is tiny).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.live_bytes import LiveBytes
from benchmarks.quiet import PLAIN_TRAINER
from benchmarks.ranks import run_ranks, say_from_first
from benchmarks.report import Goal, finish, say, table_of
from trainwright.recipes.gpt.model import GPT, GPTConfig
from trainwright.strategies.contract.registry import make_strategy
from trainwright.trainer.trainer import Trainer

MOST_ABOVE_FORMULA = 1.02
STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
# Bytes of a bucket as a part of the model's: with torch's 25 MiB a small model would be one bucket, and what is on its
# way would be all there is.
_BUCKETS = 64


def formula(stage: int, parameters: int, ranks: int) -> float:
    """Bytes per rank of parameters, gradients and AdamW's state in fp32."""
    if stage == 0:
        return 16.0 * parameters
    whole = {1: 8, 2: 4, 3: 0}[stage]
    return whole * parameters + (16 - whole) * parameters / ranks


class Ids(Dataset[Tensor]):
    """One short row of token ids per sample."""

    def __init__(self, samples: int, length: int) -> None:
        self.rows = torch.randint(0, 256, (samples, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Model(pl.LightningModule):
    """A transformer all of whose dimensions can be divided by the numbers of ranks."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.model = GPT(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Next-token loss."""
        logits: Tensor = self.model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW: two numbers of state per parameter."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass
class Peak:
    """The most that was held at any sampled phase, bytes."""

    state: int = 0
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    phase: str = ""


class Sampler(pl.Callback):
    """Looks at what is held at each phase of each step, and counts all living tensors in between.

    Args:
        after_steps: optimizer steps before the first look: optimizer state comes with the first, and with the second
            DDP has exchanged its buckets once for those in the order of backward.
    """

    sees_parts = True  # what a rank holds is weighed, not the wholes that hooks are shown

    def __init__(self, after_steps: int = 2) -> None:
        self.peak = Peak()
        self.all_tensors = 0
        self._after_steps = after_steps
        self._at_rest = 0
        self._live: LiveBytes | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        """At rest: no parameter is gathered."""
        if trainer.global_step < self._after_steps:
            return
        self._at_rest = trainer.strategy.measures.held_bytes().parameters  # type: ignore[attr-defined]
        self._look("before forward", trainer)
        if self._live is None:
            self._live = LiveBytes(_tensors_of(trainer))
            self._live.__enter__()

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """After forward; gradients of the step before may still be there."""
        self._look("after forward", trainer)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """After forward."""
        self._look("before backward", trainer)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After backward."""
        self._look("after backward", trainer)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Before the step."""
        self._look("before the step", trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """After the step, gradients not yet dropped."""
        self._look("after the step", trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop counting."""
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self.all_tensors = self._live.peak
            self._live = None

    def _look(self, phase: str, trainer: pl.Trainer) -> None:
        if not self._at_rest:
            return
        held = trainer.strategy.measures.held_bytes()  # type: ignore[attr-defined]
        state = self._at_rest + held.gradients + held.optimizer
        if state > self.peak.state:
            gathered = self.peak.gathered
            self.peak = Peak(state, self._at_rest, held.gradients, held.optimizer, gathered, phase)
        self.peak.gathered = max(self.peak.gathered, held.parameters - self._at_rest)


def _tensors_of(trainer: pl.Trainer) -> list[Tensor]:
    parameters = [p for o in trainer.optimizers for group in o.param_groups for p in group["params"]]
    states = [t for o in trainer.optimizers for s in o.state.values() for t in s.values() if isinstance(t, Tensor)]
    gradients = [p.grad for p in parameters if p.grad is not None]
    assert trainer.lightning_module is not None
    return [*trainer.lightning_module.parameters(), *parameters, *states, *gradients]


def measure(strategy: str, accumulation: int, config: GPTConfig) -> dict[str, Any]:
    """Train a few steps on this rank and return its row; ranks that hold more come first.

    Args:
        strategy: name in the registry.
        accumulation: micro-batches per optimizer step.
        config: sizes of the model.
    """
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    module, sampler = Model(config), Sampler()
    parameters = sum(p.numel() for p in module.parameters())
    options = {} if strategy == "ddp" else {"bucket_mib": parameters * 4 / 2**20 / _BUCKETS}
    options_of_trainer: dict[str, Any] = {**PLAIN_TRAINER, "accelerator": "cpu", "devices": ranks, "max_steps": 4}
    trainer = Trainer(
        strategy=make_strategy(strategy, **options),
        accumulate_grad_batches=accumulation,
        callbacks=[sampler],
        **options_of_trainer,
    )
    trainer.fit(module, DataLoader(Ids(ranks * accumulation * 4, config.seq_len + 1), batch_size=1))
    peak, expected = sampler.peak, formula(STAGES[strategy], parameters, ranks)
    row = {
        "strategy": strategy,
        "N": ranks,
        "accumulation": accumulation,
        "parameters": peak.parameters,
        "gradients": peak.gradients,
        "optimizer": peak.optimizer,
        "peak": peak.state,
        "formula": round(expected),
        "ratio": round(peak.state / expected, 4),
        "gathered": peak.gathered,
        "all_tensors": sampler.all_tensors,
        "at": peak.phase,
    }
    rows: list[Any] = [None] * ranks
    dist.all_gather_object(rows, row)
    return max(rows, key=lambda one: one["peak"])


def measure_all(strategies: list[str], accumulations: list[int], config: GPTConfig) -> list[dict[str, Any]]:
    """One row per strategy and accumulation, of the rank that holds most; called on every rank."""
    rows = []
    for strategy in strategies:
        for accumulation in accumulations:
            rows.append(measure(strategy, accumulation, config))
            last = rows[-1]
            say_from_first(f"N={last['N']} {strategy} accumulation {accumulation}: {last['ratio']} of the formula")
    return rows


def for_people(row: dict[str, Any]) -> dict[str, Any]:
    """The row with bytes as MiB and short names, for the table."""
    names = {
        "strategy": "strategy",
        "N": "N",
        "accumulation": "accum.",
        "parameters": "param.",
        "gradients": "grad.",
        "optimizer": "optim.",
        "peak": "peak held",
        "formula": "formula",
        "ratio": "ratio",
        "gathered": "gathered",
        "all_tensors": "all tensors",
        "at": "peak at",
    }
    sizes = ("parameters", "gradients", "optimizer", "peak", "formula", "gathered", "all_tensors")
    return {short: round(row[name] / 2**20, 2) if name in sizes else row[name] for name, short in names.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="how many (default: 1 2 4 8)")
    parser.add_argument("--strategies", nargs="+", choices=STAGES, default=list(STAGES), help="default: all")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 2], help="micro-batches (default: 1 2)")
    parser.add_argument("--dim", type=int, default=128, help="width of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model (default: %(default)s)")
    options = parser.parse_args()
    config = GPTConfig(layers=options.layers, dim=options.dim, heads=8, seq_len=4)
    rows = []
    for ranks in options.ranks:
        say(f"{ranks} rank(s)")
        rows += run_ranks(measure_all, ranks, options.strategies, options.accumulation, config)[0]
    parameters = sum(p.numel() for p in GPT(config).parameters())
    rows.sort(key=lambda row: (STAGES[row["strategy"]], row["accumulation"], row["N"]))
    worst = max(row["ratio"] for row in rows)
    title = f"MiB per rank (the one that holds most), fp32 AdamW, {parameters:,} parameters"
    goals = [Goal("held bytes, as a part of the formula, at the worst", worst, MOST_ABOVE_FORMULA)]
    finish("memory", [table_of(title, [for_people(row) for row in rows])], goals, {"model": parameters, "rows": rows})


if __name__ == "__main__":
    main()
