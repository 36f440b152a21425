"""Local updates: bytes that a rank sends over a run, and the loss, against DDP.

The byte-level GPT of ``recipe=gpt`` (nano) on the CPU, fp32. Every side trains the same samples from the same weights,
for several seeds; reported are the bytes sent per rank per optimizer step, on average over the run, by
``CommunicationMeter`` and by the kernel's counters, and the loss on held-out text of the mean over the replicas, beside
that of DDP.
"""

from __future__ import annotations

import argparse
from statistics import mean, stdev
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.layouts import written_bytes
from benchmarks.quiet import PLAIN_TRAINER
from benchmarks.ranks import run_ranks
from benchmarks.report import Goal, finish, say, table_of
from trainwright.recipes.data.text_corpus import TextCorpus
from trainwright.recipes.gpt.model import GPTConfig
from trainwright.recipes.gpt.module import GPTModule
from trainwright.strategies.contract.communication.meter import CommunicationMeter
from trainwright.strategies.contract.registry import make_strategy
from trainwright.trainer.trainer import Trainer

DDP = "ddp"
_SENT_IN_BF16 = "diloco H=50, bf16"
# Side -> name of the strategy and its options.
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    DDP: ("ddp", {}),
    "local_sgd H=10": ("local_sgd", {"sync_every": 10}),
    "local_sgd H=50": ("local_sgd", {"sync_every": 50}),
    "diloco H=10, bf16": ("diloco", {"sync_every": 10, "compression": "bf16"}),
    _SENT_IN_BF16: ("diloco", {"sync_every": 50, "compression": "bf16"}),
    "diloco H=50, bf16, momentum 0.5": ("diloco", {"sync_every": 50, "compression": "bf16", "outer_momentum": 0.5}),
}
LEAST_FEWER = 90.0
_BATCH, _LR = 32, 0.004
_KERNEL_TOLERANCE = 0.02


class _WholeRun(pl.Callback):
    """Counts what this rank sends from the first step to the last, validation left out.

    Args:
        steps: optimizer steps of the run.

    Attributes:
        sent: bytes by the strategy's meter.
        written: bytes that this process gave to the kernel meanwhile.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._meter: CommunicationMeter | None = None
        self.sent = 0.0
        self.written = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Count from the first one."""
        if self._meter is None:
            self._meter = trainer.strategy.measures.measure_communication()  # type: ignore[attr-defined]
            self.written = -written_bytes()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """To the last one."""
        if trainer.global_step == self._steps:
            assert self._meter is not None
            self.written += written_bytes()
            self._meter.stop()
            self.sent = sum(sent.bytes for sent in self._meter.take().values())


def train(side: str, steps: int, seed: int) -> dict[str, Any]:
    """Train on this rank; returns bytes of a step, and the loss on held-out text.

    Args:
        side: a key of :data:`SIDES`.
        steps: optimizer steps of 32 windows.
        seed: of the weights and the order of samples.
    """
    ranks = torch.distributed.get_world_size()
    pl.seed_everything(seed, verbose=False)
    module = GPTModule(
        GPTConfig(layers=4, dim=128, heads=4, seq_len=128, tied_head=True, init_std=0.05),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=_LR),
        schedule_steps=steps,
    )
    name, options = SIDES[side]
    count = _WholeRun(steps)
    trainer = Trainer(
        strategy=make_strategy(name, **options),
        accelerator="cpu",
        devices=ranks,
        max_steps=steps,
        gradient_clip_val=1.0,
        limit_val_batches=16,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        val_check_interval=steps,
        data_seed=seed,
        callbacks=[count],
        **PLAIN_TRAINER,
    )
    trainer.fit(module, TextCorpus(seq_len=128, batch_size=_BATCH // ranks))
    return {
        "bytes": count.sent / steps,
        "kernel": count.written / steps,
        "loss": float(trainer.callback_metrics["val_loss"]),
    }


def measure(sides: list[str], ranks: int, steps: int, seeds: int) -> list[dict[str, Any]]:
    """One row per side: bytes of a step, and the mean loss over seeds, beside those of DDP."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for seed in range(seeds):
        for side in sides:
            found[side].append(run_ranks(train, ranks, side, steps, seed)[0])
            last = found[side][-1]
            say(f"seed {seed}, {side}: {last['bytes']:.0f} bytes a step, loss {last['loss']:.4f}")
    return [_row(side, runs, found[DDP], ranks) for side, runs in found.items()]


def _row(side: str, runs: list[dict[str, Any]], dense: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
    losses = [run["loss"] for run in runs]
    return {
        "side": side,
        "ranks": ranks,
        "bytes": round(runs[0]["bytes"]),
        "kernel": round(runs[0]["kernel"]),
        "fewer": round(dense[0]["bytes"] / runs[0]["bytes"], 1),
        "fewer_by_kernel": round(dense[0]["kernel"] / runs[0]["kernel"], 1),
        "loss": round(mean(losses), 4),
        "spread": round(stdev(losses), 4) if len(losses) > 1 else None,
        "loss_to_ddp": round(mean(run["loss"] / other["loss"] for run, other in zip(runs, dense, strict=True)), 4),
    }


def goals_of(rows: list[dict[str, Any]]) -> list[Goal]:
    """Return the goals: the meter agrees with the kernel, and the reduction of bytes sent."""
    goals = []
    for row in rows:
        far = abs(row["kernel"] / row["bytes"] - 1)
        goals.append(Goal(f"kernel's bytes beside the meter's, {row['side']}", far, _KERNEL_TOLERANCE))
        if row["side"] == _SENT_IN_BF16:
            goals.append(
                Goal(f"times fewer bytes than ddp, {row['side']}", row["fewer_by_kernel"], LEAST_FEWER, at_least=True)
            )
    return goals


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.local_updates", description=(__doc__ or "").split("\n\n")[0]
    )
    add = parser.add_argument
    add("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="beside ddp (default: all)")
    add("--ranks", type=int, default=2, help="replicas (default: %(default)s)")
    add("--steps", type=int, default=500, help="optimizer steps, a multiple of 50 (default: %(default)s)")
    add("--seeds", type=int, default=3, help="default: %(default)s")
    options = parser.parse_args()
    if options.steps % 50 or options.steps < 1:
        parser.error(f"--steps {options.steps}: take a multiple of 50, so that the last steps are sent as well")
    sides = list(dict.fromkeys([DDP, *options.sides]))
    rows = measure(sides, options.ranks, options.steps, options.seeds)
    title = (
        f"gpt nano on {options.ranks} ranks, {options.steps} steps, {options.seeds} seed(s): bytes of a rank and step"
    )
    finish("local_updates", [table_of(title, rows)], goals_of(rows), {"rows": rows})


if __name__ == "__main__":
    main()
