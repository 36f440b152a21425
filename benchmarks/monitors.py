"""Cost of monitoring a step: monitors on and off, in turns.

All sides train the same small model on the CPU, one process, with steps of about 50 ms. The monitors are those of
`conf/monitor/<name>.yaml` without what writes to the terminal, with a run directory and windows of 50 steps, as is the
default; off is `monitor=none`. What counts is CPU time of the process, which other programs of the machine hardly
change, against a step of 50 ms. With `--layers 2 --width 32` a step is short, and its own noise small.

A step costs what an ordinary one does (the median, from the second window on), and its part of the end of a window.
A difference of two steps of 35 ms is known to about 1 ms on a machine whose speed wavers. So the hooks of the callbacks
are timed from within too (`us_in_hooks`, the mean from the second window on, ends of windows included): what they take
behind a real step, whose data have pushed theirs out of the caches, is known to some microseconds.

What a run costs once (starting, counting the operations of the first micro-batch, new columns of `metrics.csv`, ending)
is reported separately, in ms per run: all CPU time of the fit that steps of that length do not explain.

Memory that a step frees is kept. Else glibc gives it back to the system if it lies at the end of the heap, and has it
back page by page in the next step: up to a thousand page faults, 2 ms, at every step or at none, by the chance of what
was allocated last in the first step. That cost does not belong to the code that allocated it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.alternate import alternate
from benchmarks.quiet import PLAIN_TRAINER, silence_lightning
from benchmarks.report import Goal, finish, table_of
from trainwright import compose
from trainwright.core.processes.machine import keep_freed_memory
from trainwright.trainer.loggers.metrics_csv import MetricsCSV
from trainwright.trainer.trainer import Trainer

MOST_PART = 0.01
_STEP_US = 50_000
_TERMINAL = ("start_summary", "progress_bar")
_EVERY = 50
_HOOKS_OF_STEPS = ("batch", "backward", "zero_grad", "optimizer_step")


class Rows(Dataset[Tensor]):
    """``samples`` times the same row."""

    def __init__(self, samples: int, width: int) -> None:
        self.samples, self.row = samples, torch.randn(width)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return self.row


class Stack(pl.LightningModule):
    """Layers in a row.

    Args:
        layers: how many.
        width: of each.
    """

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean of the squares of the last layer's output."""
        hidden = batch
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Taken:
    """CPU seconds of a fit.

    Args:
        step: an ordinary step, neither of the first window nor the last of a window.
        window: by how much the last step of a window is longer.
        mean: a step of whole windows, the first left out: garbage collections and all else that is rare included.
        once: what the whole fit took longer than its steps would have.
        hooks: of a step, what the hooks of all monitors took, the first window left out.
    """

    step: float
    window: float
    mean: float
    once: float
    hooks: float = 0.0

    @property
    def per_step(self) -> float:
        """A step with its part of the end of a window."""
        return self.step + self.window / _EVERY


class CPUTime(pl.Callback):
    """CPU time of this process at the end of each step."""

    def __init__(self, hooks: HookTime) -> None:
        self.ends: list[float] = []
        self.in_hooks: list[float] = []
        self._hooks = hooks

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Look."""
        self.ends.append(time.process_time())
        self.in_hooks.append(self._hooks.seconds)


class HookTime:
    """CPU time within the hooks of callbacks that are called at every step.

    Args:
        callbacks: whose hooks are timed from now on.
    """

    def __init__(self, callbacks: Sequence[pl.Callback]) -> None:
        self.seconds = 0.0
        for callback in callbacks:
            for name in vars(pl.Callback):
                if any(part in name for part in _HOOKS_OF_STEPS) and is_overridden(name, callback, pl.Callback):
                    setattr(callback, name, self._timed(getattr(callback, name)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.thread_time()
            try:
                return hook(*args)
            finally:
                self.seconds += time.thread_time() - begin

        return timed


def taken(begin: float, ends: Sequence[float], end: float) -> Taken:
    """Split the CPU time of a fit into steps and one-time costs.

    Args:
        begin: CPU time at which it was called.
        ends: at which its steps ended.
        end: at which it returned.
    """
    whole = len(ends) // _EVERY * _EVERY
    lasted = [after - before for before, after in pairwise(ends[:whole])]  # of the second step on
    later = lasted[_EVERY - 1 :]
    step = median(each for number, each in enumerate(later, 1) if number % _EVERY)
    window = sum(later[_EVERY - 1 :: _EVERY]) / (len(later) // _EVERY) - step
    return Taken(step, window, sum(later) / len(later), end - begin - len(ends) * (step + window / _EVERY))


def train(monitor: str, steps: int, layers: int, width: int) -> Taken:
    """Train under one choice of the group ``monitor``."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = compose(recipe="gpt", overrides=[f"monitor={monitor}", f"run_dir={folder}"])
        watching = [instantiate(each) for name, each in cfg.monitor.items() if name not in _TERMINAL and each]
        clock = CPUTime(HookTime(watching))
        options: dict[str, Any] = {**PLAIN_TRAINER, "accelerator": "cpu", "devices": 1, "max_steps": steps}
        options |= {"log_every_n_steps": _EVERY, "logger": MetricsCSV(folder), "default_root_dir": folder}
        data = DataLoader(Rows(steps * 8, width), batch_size=8)
        trainer, module = Trainer(callbacks=[*watching, clock], **options), Stack(layers, width)
        begin = time.process_time()
        trainer.fit(module, data)
        end = time.process_time()
        if monitor != "none":
            assert (Path(folder) / "monitor" / "rank_0.jsonl").stat().st_size, "the monitors have not written anything"
    hooks = (clock.in_hooks[-1] - clock.in_hooks[_EVERY - 1]) / (len(clock.in_hooks) - _EVERY)
    return replace(taken(begin, clock.ends, end), hooks=hooks)


def measure(monitors: list[str], steps: int, repeats: int, layers: int, width: int) -> list[dict[str, Any]]:
    """One row per choice: milliseconds of a step, and what it costs over ``none`` of the same round; medians."""
    sides: dict[str, Callable[[], Taken]] = {name: partial(train, name, steps, layers, width) for name in monitors}
    for name in monitors:
        train(name, 2 * _EVERY, 1, 1)  # the first fit imports
    found = alternate(sides, repeats, lambda each: f"{each.per_step * 1e3:.2f} ms a step")
    off = found["none"]

    def more(side: list[Taken], what: str) -> float:
        return median(getattr(a, what) - getattr(b, what) for a, b in zip(side, off, strict=True))

    return [
        {
            "monitor": name,
            "cpu_ms": round(median(each.per_step for each in side) * 1e3, 3),
            "us_in_hooks": round(median(each.hooks for each in side) * 1e6, 1),
            "us_per_step": round(more(side, "per_step") * 1e6, 1),
            "us_ordinary_step": round(more(side, "step") * 1e6, 1),
            "us_mean_step": round(more(side, "mean") * 1e6, 1),
            "ms_per_window": round(more(side, "window") * 1e3, 2),
            "ms_per_run": round(more(side, "once") * 1e3, 1),
        }
        for name, side in found.items()
    ]


def goals_of(rows: list[dict[str, Any]], most: float = MOST_PART) -> list[Goal]:
    """Every choice costs at most so large a part of a step."""
    return [
        Goal(
            f"part of a step of 50 ms that monitor={row['monitor']} costs",
            round(row["us_in_hooks"] / _STEP_US, 5),
            most,
        )
        for row in rows
        if row["monitor"] != "none"
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.monitors", description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=150, help="steps of one measurement, 100 or more (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each side (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=24, help="of the model (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="of each layer (default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 2 * _EVERY:
        parser.error(f"--steps {options.steps} (allowed: {2 * _EVERY} or more, the first {_EVERY} are left out)")
    keep_freed_memory()
    silence_lightning()
    torch.set_num_threads(1)
    monitors = ["none", "default", "thorough"]
    rows = measure(monitors, options.steps, options.repeats, options.layers, options.width)
    title = f"Cost of monitors, medians of {options.repeats} measurements of {options.steps} steps"
    finish("monitors", [table_of(title, rows)], goals_of(rows), {"steps": options.steps, "rows": rows})


if __name__ == "__main__":
    main()
