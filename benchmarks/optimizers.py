"""Optimizers that are not element-wise, sharded: losses, state held and time of the step, against one that is whole.

A GPT trains on the same samples with every optimizer on one process and on two ranks under each layout. ``ddp`` shards
nothing: it is the unsharded form, and shows how far rounding alone moves losses (Muon iterates in bfloat16, and 8 bits
are few). Layouts take turns. The step is what follows backward, with its exchange of parameters; that of the slowest
rank counts. AdamW, which is element-wise, stands for comparison.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks.alternate import alternate
from benchmarks.memory import Ids, Model
from benchmarks.quiet import PLAIN_TRAINER
from benchmarks.ranks import run_ranks
from benchmarks.report import Goal, finish, say, table_of
from trainwright.core.run.phases import OPTIMIZER
from trainwright.recipes.gpt.model import GPTConfig
from trainwright.strategies.contract.registry import make_strategy
from trainwright.trainer.trainer import Trainer

MOST_LOSS_DIFFERENCE = 1e-5
RANKS, SAMPLES = 2, 8
UNSHARDED = "ddp"
LAYOUTS: dict[str, dict[str, Any]] = {UNSHARDED: {}, "zero1": {}, "zero3": {}, "tensor": {}}


def _matrices(module: Model) -> list[torch.nn.Parameter]:
    return [p for p in module.model.blocks.parameters() if p.dim() == 2]


def _adam_of_8_bits(module: Model) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(module.parameters(), lr=1e-3)  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Callable[[Model], Optimizer]] = {
    "AdamW": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3),
    "Muon": lambda module: torch.optim.Muon(_matrices(module), lr=1e-2),
    "Adafactor": lambda module: torch.optim.Adafactor(module.parameters(), lr=1e-2),
    "AdamW, 8 bit": _adam_of_8_bits,
}


class Trained(Model):
    """The model with one of :data:`OPTIMIZERS`."""

    def __init__(self, config: GPTConfig, optimizer: str) -> None:
        super().__init__(config)
        self.optimizer = optimizer

    def configure_optimizers(self) -> Optimizer:
        """Build it by its name."""
        return OPTIMIZERS[self.optimizer](self)


class Observe(pl.Callback):
    """Records losses, seconds of each step and the optimizer state of this rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.held = 0
        self._begin: float | None = None

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Listen to phases."""
        trainer.fit_loop.epoch_loop.phases.listen(self._hear)

    def _hear(self, phase: str) -> None:
        if self._begin is not None:
            self.seconds.append(time.perf_counter() - self._begin)
        self._begin = time.perf_counter() if phase == OPTIMIZER else None

    def on_train_batch_end(self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        """Record the loss over all samples."""
        loss = outputs["loss"].clone()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        self.losses.append(float(loss))
        self.held = trainer.strategy.measures.held_bytes().optimizer


def train(optimizer: str, layout: str | None, config: GPTConfig, steps: int) -> Observe:
    """Train on this rank.

    Args:
        optimizer: of :data:`OPTIMIZERS`.
        layout: of :data:`LAYOUTS`; ``None``: on one process.
        config: sizes of the model.
        steps: optimizer steps.
    """
    torch.manual_seed(0)
    observe = Observe()
    ranks = 1 if layout is None else RANKS
    data_ranks = 1 if layout in (None, "tensor") else RANKS
    options: dict[str, Any] = {**PLAIN_TRAINER, "accelerator": "cpu", "devices": ranks, "max_steps": steps}
    if layout is not None:
        options["strategy"] = make_strategy(layout, **LAYOUTS[layout])
    loader = DataLoader(Ids(SAMPLES * steps, config.seq_len + 1), batch_size=SAMPLES // data_ranks)
    Trainer(callbacks=[observe], **options).fit(Trained(config, optimizer), loader)
    return observe


def losses_alone(optimizer: str, config: GPTConfig, steps: int) -> list[float]:
    """Return the losses of one process."""
    return train(optimizer, None, config, steps).losses


def measure(optimizer: str, config: GPTConfig, steps: int, rounds: int) -> dict[str, Any]:
    """Train under every layout in turns on this rank.

    Returns:
        Of each layout: losses, and of the slowest and fullest rank the median seconds of a step and the bytes of state.
    """
    sides = {layout: partial(train, optimizer, layout, config, steps) for layout in LAYOUTS}
    taken = alternate(sides, rounds, lambda seen: f"{1e3 * median(seen.seconds[1:]):.0f} ms")
    found = {}
    for layout, all_seen in taken.items():
        worst = torch.tensor([median(s for seen in all_seen for s in seen.seconds[1:]), float(all_seen[0].held)])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        found[layout] = {"losses": all_seen[0].losses, "seconds": float(worst[0]), "held": int(worst[1])}
    return found


def rows_of(optimizer: str, found: dict[str, Any], alone: list[float]) -> list[dict[str, Any]]:
    """One row per layout: the largest difference of a loss, the step and the state; ratios are to the unsharded form.

    Args:
        optimizer: of :data:`OPTIMIZERS`.
        found: by :func:`measure`.
        alone: losses of one process.
    """
    whole = found[UNSHARDED]
    differences = {
        layout: max(abs(a - b) for a, b in zip(each["losses"], alone, strict=True)) for layout, each in found.items()
    }
    return [
        {
            "optimizer": optimizer,
            "layout": layout,
            "from_one_process": float(f"{differences[layout]:.1e}"),
            "beyond_ddp": float(f"{max(0.0, differences[layout] - differences[UNSHARDED]):.1e}"),
            "step_ms": round(1e3 * each["seconds"], 1),
            "time_ratio": round(each["seconds"] / whole["seconds"], 2),
            "state_mib": round(each["held"] / 2**20, 2),
            "state_ratio": round(each["held"] / whole["held"], 3),
        }
        for layout, each in found.items()
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizers", description=__doc__)
    add = parser.add_argument
    add("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), help="default: all")
    add("--dim", type=int, default=256, help="width of the model (default: %(default)s)")
    add("--layers", type=int, default=4, help="blocks of the model (default: %(default)s)")
    add("--steps", type=int, default=8, help="optimizer steps of a measurement (default: %(default)s)")
    add("--rounds", type=int, default=3, help="measurements of each layout (default: %(default)s)")
    options = parser.parse_args()
    config = GPTConfig(layers=options.layers, dim=options.dim, heads=8, seq_len=32)
    rows: list[dict[str, Any]] = []
    for optimizer in options.optimizers:
        say(f"{optimizer} on one process, then on {RANKS} ranks")
        alone = run_ranks(losses_alone, 1, optimizer, config, options.steps, backend=None)[0]
        found = run_ranks(measure, RANKS, optimizer, config, options.steps, options.rounds)[0]
        rows += rows_of(optimizer, found, alone)
    worst = max(row["beyond_ddp"] for row in rows)
    title = f"The optimizer's step on {RANKS} ranks; ratios to {UNSHARDED}, where every rank steps the whole"
    goals = [Goal("loss: difference from one process, beyond that of ddp", worst, MOST_LOSS_DIFFERENCE)]
    finish("optimizers", [table_of(title, rows)], goals, {"options": vars(options), "rows": rows})


if __name__ == "__main__":
    main()
