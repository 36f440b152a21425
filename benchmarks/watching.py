"""Cost of finding slow ranks (Stragglers) and of comparing replicas (ReplicaCheck).

Data parallel training of a small GPT on the CPU. Within one run, blocks of steps with `Stragglers` take turns with
blocks without it, so that a busy moment of the machine does not affect one side alone; the median over pairs of
neighbouring blocks is reported. Replica checks are timed at the end of the same run.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.quiet import PLAIN_TRAINER, silence_lightning
from benchmarks.ranks import run_ranks
from benchmarks.report import Goal, finish, table_of
from trainwright.callbacks.guard.replica_check import ReplicaCheck
from trainwright.callbacks.traffic.stragglers import Stragglers
from trainwright.recipes.gpt.model import GPT, GPTConfig
from trainwright.trainer.trainer import Trainer

MOST_RATIO = 1.01
_VOCABULARY, _LENGTH, _BATCH = 256, 64, 4
_WARM_UP = 10  # steps before the first block


class Texts(Dataset[Tensor]):
    """``samples`` random sequences, int64 ``(length + 1,)``."""

    def __init__(self, samples: int) -> None:
        self.tokens = torch.randint(_VOCABULARY, (samples, _LENGTH + 1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class Model(pl.LightningModule):
    """A small GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(layers=4, dim=128, heads=4, kv_heads=4, hidden=384, vocab=_VOCABULARY))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Next-token loss."""
        logits = self.gpt(batch[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, as most language models have."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class TakeTurns(pl.Callback):
    """Watches every other block of steps, and times all blocks.

    Args:
        block: steps of a block; the report and its exchange at the end of each watched one are among them.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self.seconds: tuple[list[float], list[float]] = ([], [])  # per step, without and with
        self.cpu: tuple[list[float], list[float]] = ([], [])  # processor time of this process
        self._watching: Stragglers | None = None
        self._count = -_WARM_UP
        self._begin = (0.0, 0.0)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count, and change sides at the end of a block."""
        if self._watching is not None:
            self._watching.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._count += 1
        if self._count < 0 or self._count % self.block:
            return
        now = time.perf_counter(), time.process_time()
        if self._count:
            side = int(self._watching is not None)
            self.seconds[side].append((now[0] - self._begin[0]) / self.block)
            self.cpu[side].append((now[1] - self._begin[1]) / self.block)
        self._change(trainer, pl_module)
        self._begin = time.perf_counter(), time.process_time()

    def _change(self, trainer: Any, pl_module: Any) -> None:
        if self._watching is not None:
            self._watching.teardown(trainer, pl_module, "fit")
            self._watching = None
        else:
            self._watching = Stragglers(every_n_steps=self.block - 1)  # its first step is left out
            self._watching.on_train_start(trainer, pl_module)


class TimeChecks(pl.Callback):
    """Times checks of replicas at the end of training."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.seconds: list[float] = []
        self.gibibytes = 0.0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Check again and again."""
        check = ReplicaCheck()
        check.setup(trainer, pl_module, "fit")
        check.check(trainer)  # the first one finds out who holds what
        self.gibibytes = sum(parts.num_bytes for parts in trainer.strategy.trained_boxes().values()) / 2**30
        for _ in range(self.repeats):
            begin = time.perf_counter()
            check.check(trainer)
            self.seconds.append(time.perf_counter() - begin)


def measure(block: int, pairs: int) -> dict[str, Any]:
    """On one rank: what both cost."""
    silence_lightning()
    turns, checks = TakeTurns(block), TimeChecks(pairs)
    steps = _WARM_UP + 2 * pairs * block
    options: dict[str, Any] = {**PLAIN_TRAINER, "max_steps": steps, "max_epochs": -1, "accelerator": "cpu"}
    trainer = Trainer(strategy="ddp", devices=2, callbacks=[turns, checks], **options)
    trainer.fit(Model(), DataLoader(Texts(256), batch_size=_BATCH))
    return {"seconds": turns.seconds, "cpu": turns.cpu, "checks": checks.seconds, "gibibytes": checks.gibibytes}


def rows_of(taken: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per rank and clock: seconds of a step without and with, and the ratio."""
    rows = []
    for rank, result in enumerate(taken):
        for clock in ("seconds", "cpu"):
            without, with_ = result[clock]
            rows.append(
                {
                    "rank": rank,
                    "clock": "wall" if clock == "seconds" else "processor",
                    "ms_per_step_without": round(1e3 * median(without), 3),
                    "ms_per_step_with": round(1e3 * median(with_), 3),
                    "ratio": round(median(b / a for a, b in zip(without, with_, strict=True)), 4),
                }
            )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watching", description=__doc__)
    parser.add_argument("--block", type=int, default=50, help="steps of a block (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of blocks (default: %(default)s)")
    options = parser.parse_args()
    if options.block < 2 or options.pairs < 1:
        parser.error("--block must be at least 2, --pairs at least 1")
    taken = run_ranks(measure, 2, options.block, options.pairs)
    rows = rows_of(taken)
    check_ms = 1e3 * max(median(each["checks"]) for each in taken)
    processor = max(row["ratio"] for row in rows if row["clock"] == "processor")
    check = {"held_mib": round(1024 * taken[0]["gibibytes"], 1), "ms_per_check": round(check_ms, 2)}
    goals = [Goal("processor time of a step with Stragglers over that without", processor, MOST_RATIO)]
    tables = [table_of("Stragglers", rows), table_of("ReplicaCheck", [check])]
    finish("watching", tables, goals, {"rows": rows, "replica_check": check})


if __name__ == "__main__":
    main()
