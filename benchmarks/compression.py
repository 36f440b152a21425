"""Gradient compression: bytes sent, loss, and seconds per step on a slow link.

The byte-level GPT of ``recipe=gpt`` (nano) on the CPU, data parallel, fp32. Every compressor and plain DDP train the
same samples from the same weights, for several seeds; reported are the bytes that a rank sends in the last step, by the
formula and by the kernel's counters, and the loss on held-out text beside that of DDP. ``fewer`` is of a step after the
warm-up, ``fewer_in_all`` of the whole run, in whose warm-up gradients are sent as they are.

With ``--link`` steps are timed instead of losses reported, on a loopback device of that rate, in a network namespace
of its own that is gone with the process (``unshare``, ``ip`` and ``tc`` of Linux): sides in turns, seconds of a step
beside those of DDP.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from statistics import mean, median, stdev
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.alternate import alternate
from benchmarks.layouts import Observe
from benchmarks.quiet import PLAIN_TRAINER
from benchmarks.ranks import run_ranks
from benchmarks.report import Goal, finish, say, table_of
from benchmarks.slow_link import on_a_slow_link
from trainwright.recipes.data.text_corpus import TextCorpus
from trainwright.recipes.gpt.model import GPTConfig
from trainwright.recipes.gpt.module import GPTModule
from trainwright.strategies.averaging.compression.compressor import ring_bytes
from trainwright.strategies.averaging.compression.options import choose_compression
from trainwright.strategies.contract.registry import make_strategy
from trainwright.trainer.trainer import Trainer

DENSE = "none"
# Side -> the argument `compression`.
SIDES: dict[str, dict[str, Any]] = {
    DENSE: {"name": DENSE},
    "bf16": {"name": "bf16"},
    "int8": {"name": "int8"},
    "topk 1 %": {"name": "topk", "ratio": 0.01},
    "powersgd rank 4": {"name": "powersgd", "rank": 4},
    "onebit": {"name": "onebit"},
}
# Side -> how many times fewer bytes it is to send at least, and how much more loss it may end with at most.
GOALS = {"topk 1 %": (20.0, 1.02), "powersgd rank 4": (20.0, 1.02), "onebit": (5.0, None)}
_LR = 0.004
# Of a timed run: what is set up in the first steps, and a warm-up of one step, is not what a step costs.
_UNTIMED_STEPS = 3
_KERNEL_TOLERANCE = 0.02


class _StepTimes(pl.Callback):
    """When each optimizer step ended, in seconds."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        """Note it."""
        self.ends.append(time.perf_counter())


def train(
    compression: dict[str, Any], ranks: int, sizes: tuple[int, int], steps: int, seed: int, validate: bool
) -> dict[str, Any]:
    """Train on this rank; returns the row, without what is said of it beside others.

    Args:
        compression: the strategy's argument.
        ranks: data parallel ones.
        sizes: windows of an optimizer step, over all ranks, and bytes of a window.
        steps: optimizer steps.
        seed: of the weights and the order of samples.
        validate: whether the loss on held-out text is computed.
    """
    pl.seed_everything(seed, verbose=False)
    batch, seq_len = sizes
    module = GPTModule(
        GPTConfig(layers=4, dim=128, heads=4, seq_len=seq_len, tied_head=True, init_std=0.05),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=_LR),
        schedule_steps=steps,
    )
    observe, times = Observe(steps), _StepTimes()
    strategy = make_strategy("ddp", compression=compression)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=ranks,
        max_steps=steps,
        limit_val_batches=16 if validate else 0,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        val_check_interval=steps,
        data_seed=seed,
        callbacks=[observe, times],
        **PLAIN_TRAINER,
    )
    trainer.fit(module, TextCorpus(seq_len=seq_len, batch_size=batch // ranks))
    numel = sum(parameter.numel() for parameter in module.parameters())
    seconds = [after - before for before, after in pairwise(times.ends[_UNTIMED_STEPS - 1 :])]
    return {
        "bytes": strategy.averaging.sent_bytes or ring_bytes(numel, ranks),
        "kernel": observe.written,
        "dense": ring_bytes(numel, ranks),
        "loss": float(trainer.callback_metrics["val_loss"]) if validate else None,
        "warmup_steps": warmup_of(compression),
        "step_seconds": median(seconds) if seconds else None,
    }


def warmup_of(compression: dict[str, Any]) -> int:
    """Steps at the beginning that send gradients as they are."""
    choice = choose_compression(compression)
    return 0 if choice is None else choice.warmup_steps


def asked_for(side: str, warmup_steps: int | None) -> dict[str, Any]:
    """The argument ``compression`` of a side; ``None``: with the warm-up that it has by default."""
    given = SIDES[side]
    return given if warmup_steps is None or warmup_of(given) == 0 else {**given, "warmup_steps": warmup_steps}


def measure(
    sides: list[str], ranks: int, sizes: tuple[int, int], steps: int, seeds: int, warmup_steps: int | None
) -> list[dict[str, Any]]:
    """One row per side: bytes of a step, and the mean loss over seeds beside that of DDP."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for seed in range(seeds):
        for side in sides:
            compression = asked_for(side, warmup_steps)
            found[side].append(run_ranks(train, ranks, compression, ranks, sizes, steps, seed, True)[0])
            say(f"{ranks} ranks, seed {seed}, {side}: loss {found[side][-1]['loss']:.4f}")
    dense = [row["loss"] for row in found[DENSE]]
    rows = []
    for side, runs in found.items():
        losses = [run["loss"] for run in runs]
        ratios = [loss / other for loss, other in zip(losses, dense, strict=True)]
        rows.append(
            {
                "side": side,
                "ranks": ranks,
                "bytes": runs[0]["bytes"],
                "kernel": runs[0]["kernel"],
                "fewer": round(runs[0]["dense"] / runs[0]["bytes"], 1),
                "fewer_in_all": round(steps / _dense_steps(runs[0], steps), 1),
                "loss": round(mean(losses), 4),
                "spread": round(stdev(losses), 4) if seeds > 1 else None,
                "loss_to_dense": round(mean(ratios), 4),
            }
        )
    return rows


def _dense_steps(run: dict[str, Any], steps: int) -> float:
    """As many dense steps send the bytes of the whole run, warm-up included."""
    warm = min(run["warmup_steps"], steps)
    return float(warm + (steps - warm) * run["bytes"] / run["dense"])


def timed(sides: list[str], ranks: int, sizes: tuple[int, int], steps: int, repeats: int) -> list[dict[str, Any]]:
    """One row per side: seconds of a step on whatever link this process has; sides in turns."""
    taken = alternate(
        {
            side: lambda side=side: run_ranks(train, ranks, asked_for(side, 1), ranks, sizes, steps, 0, False)[0][
                "step_seconds"
            ]
            for side in sides
        },
        repeats,
        lambda seconds: f"{seconds:.3f} s",
    )
    dense = median(taken[DENSE])
    return [
        {
            "side": side,
            "ranks": ranks,
            "step_seconds": round(median(seconds), 4),
            "least": round(min(seconds), 4),
            "most": round(max(seconds), 4),
            "dense_to_it": round(dense / median(seconds), 2),
        }
        for side, seconds in taken.items()
    ]


def goals_of(rows: list[dict[str, Any]]) -> list[Goal]:
    """Bounds of what was measured on two ranks, and of the formulas on any number."""
    goals = []
    for row in rows:
        name = f"{row['side']}, {row['ranks']} ranks"
        if row["side"] != DENSE:
            goals.append(
                Goal(f"kernel's bytes to the formula's, {name}", row["kernel"] / row["bytes"], 1 + _KERNEL_TOLERANCE)
            )
        if row["side"] in GOALS:
            fewer, loss = GOALS[row["side"]]
            goals.append(Goal(f"times fewer bytes, {name}", row["fewer"], fewer, at_least=True))
            if loss is not None:
                goals.append(Goal(f"loss to dense, {name}", row["loss_to_dense"], loss))
    return goals


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compression", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=None, help="numbers of ranks (default: 2 4, with --link 2)")
    add("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="default: all; none is always among them")
    add("--steps", type=int, default=300, help="optimizer steps (default: %(default)s)")
    add("--batch", type=int, default=8, help="windows of a step, over all ranks (default: %(default)s)")
    add("--seq-len", type=int, default=64, help="bytes of a window (default: %(default)s)")
    add("--warmup-steps", type=int, default=None, help="dense ones at the beginning (default: as shipped)")
    add("--seeds", type=int, default=3, help="how many (default: %(default)s)")
    add("--link", default=None, help="time steps on a slow link of this rate, like 20mbit (default: off)")
    add("--repeats", type=int, default=2, help="rounds of the timing (default: %(default)s)")
    add("--timed-steps", type=int, default=6, help="steps of a timed run, 4 or more (default: %(default)s)")
    add("--timed-here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sides = list(dict.fromkeys([DENSE, *given.sides]))
    sizes = (given.batch, given.seq_len)
    if given.timed_steps < _UNTIMED_STEPS + 1:
        parser.error(f"--timed-steps {given.timed_steps}: the first {_UNTIMED_STEPS} are not timed; type more")
    if given.timed_here or given.link is not None:
        counts = given.ranks or [2]
        if given.timed_here:
            rows = [row for ranks in counts for row in timed(sides, ranks, sizes, given.timed_steps, given.repeats)]
            print(json.dumps(rows))
            return
        more = ["--repeats", str(given.repeats), "--timed-steps", str(given.timed_steps)]
        more += ["--batch", str(given.batch), "--seq-len", str(given.seq_len)]
        times = on_a_slow_link(
            given.link,
            "benchmarks.compression",
            ["--timed-here", "--ranks", *map(str, counts), "--sides", *sides, *more],
        )
        table = table_of(f"Seconds of a step, loopback of {given.link}", times)
        finish("compression", [table], [], {"rows": [], "link": given.link, "times": times})
        return
    warm = max(warmup_of(asked_for(side, given.warmup_steps)) for side in sides)
    if given.steps <= warm:
        parser.error(f"--steps {given.steps} end in the warm-up; type --steps {warm + 1} or more, or --warmup-steps 1")
    rows = [
        row
        for ranks in given.ranks or [2, 4]
        for row in measure(sides, ranks, sizes, given.steps, given.seeds, given.warmup_steps)
    ]
    tables = [table_of("Bytes of a step and loss on held-out text", rows)]
    finish("compression", tables, goals_of(rows), {"rows": rows, "link": None, "times": []})


if __name__ == "__main__":
    main()
