"""Loss parity of runs that stop under one layout and resume under another, against a run that never stopped.

For every pair of layouts: ``trainwright fit ... max_steps=10`` under the first, then ``ckpt_path=last max_steps=20``
under the second, as a user types it. Each of the last ten losses is compared with that of a 20-step run on one
process, which read the same samples. The global batch is the same; micro-batch and accumulation differ between
layouts.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import environment_of, run_command
from benchmarks.ranks import end_on_sigterm, threads_per_rank
from benchmarks.report import Goal, finish, say, table_of

TOLERANCE = 1e-5
STOP, END = 10, 20
_GLOBAL_BATCH = 24


@dataclass(frozen=True)
class Place:
    """A layout on a number of ranks.

    Args:
        name: for the table.
        ranks: processes.
        words: what is typed for it.
        data_ranks: ranks that read different samples.
    """

    name: str
    ranks: int
    words: tuple[str, ...]
    data_ranks: int


def _place(name: str, ranks: int, strategy: str, data_ranks: int, **axes: int) -> tuple[str, Place]:
    words = (f"strategy={strategy}", *(f"strategy.{axis}={size}" for axis, size in axes.items()))
    return name, Place(name, ranks, words, data_ranks)


PLACES = dict(
    (
        _place("single", 1, "single", 1),
        _place("ddp-2", 2, "ddp", 2),
        _place("ddp-3", 3, "ddp", 3),
        _place("zero1-4", 4, "zero1", 4),
        _place("zero2-2", 2, "zero2", 2),
        _place("zero2-8", 8, "zero2", 8),
        _place("zero3-3", 3, "zero3", 3),
        _place("zero3-4", 4, "zero3", 4),
        _place("zero3-4 (2 x 2)", 4, "zero3", 4, replicate=2, shard=2),
        _place("tensor-2", 2, "tensor", 1),
        _place("tensor-4", 4, "tensor", 1),
        _place("pipeline-2", 2, "pipeline", 1),
        _place("pipeline-4", 4, "pipeline", 1),
        _place("context-2", 2, "context", 1),
        _place("pipeline 2 x tensor 2", 4, "hybrid", 1, pipeline=2, tensor=2, shard=1),
        _place("tensor 2 x shard 2", 4, "hybrid", 2, tensor=2, shard=2),
        _place("pipeline 2 x shard 2 x tensor 2", 8, "hybrid", 2, pipeline=2, shard=2, tensor=2),
        _place("pipeline 2 x replicate 2 x context 2", 8, "hybrid", 2, pipeline=2, replicate=2, context=2, shard=1),
    )
)

# Every layout is written once and read once.
PAIRS = (
    ("single", "pipeline 2 x shard 2 x tensor 2"),
    ("pipeline 2 x shard 2 x tensor 2", "ddp-3"),
    ("ddp-3", "tensor-4"),
    ("tensor-4", "zero2-8"),
    ("zero2-8", "pipeline-2"),
    ("pipeline-2", "zero3-3"),
    ("zero3-3", "tensor 2 x shard 2"),
    ("tensor 2 x shard 2", "zero1-4"),
    ("zero1-4", "pipeline-4"),
    ("pipeline-4", "ddp-2"),
    ("ddp-2", "pipeline 2 x replicate 2 x context 2"),
    ("pipeline 2 x replicate 2 x context 2", "zero3-4"),
    ("zero3-4", "context-2"),
    ("context-2", "zero2-2"),
    ("zero2-2", "pipeline 2 x tensor 2"),
    ("pipeline 2 x tensor 2", "tensor-2"),
    ("tensor-2", "zero3-4 (2 x 2)"),
    ("zero3-4 (2 x 2)", "single"),
)


def command(place: Place, run_dir: Path, steps: int, *more: str) -> list[str]:
    """Return the command line that trains up to optimizer step ``steps``."""
    per_rank = _GLOBAL_BATCH // place.data_ranks
    micro = max(size for size in (6, 4, 3, 2, 1) if per_rank % size == 0)
    return [
        *(sys.executable, "-m", "trainwright", "fit", "recipe=gpt", *place.words),
        *(f"devices={place.ranks}", "accelerator=cpu", f"max_steps={steps}", f"run_dir={run_dir}"),
        *(f"global_batch_size={_GLOBAL_BATCH}", f"micro_batch_size={micro}"),
        # The rate must not depend on where the run stops.
        f"schedule.total_steps={END}",
        *("callbacks.sample=null", "logger=csv", "trainer.log_every_n_steps=1", "trainer.limit_val_batches=0"),
        *more,
    ]


def losses_of(run_dir: Path) -> dict[int, float]:
    """Loss of the global batch by step, from the metrics of a run."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file) if row.get("loss")}


class Runs:
    """Runs commands in one folder, each first half once.

    Args:
        folder: for run directories.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._halves: dict[str, Path] = {}

    def whole(self) -> dict[int, float]:
        """Losses of the run that never stops, on one process."""
        place = PLACES["single"]
        self._run(place, self._folder / "whole", END)
        return losses_of(self._folder / "whole")

    def moved(self, first: Place, second: Place) -> dict[int, float]:
        """Losses after the change from one layout to the other."""
        if first.name not in self._halves:
            self._halves[first.name] = self._folder / f"half-{len(self._halves)}"
            self._run(first, self._halves[first.name], STOP)
        run_dir = self._folder / "moved"
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(self._halves[first.name], run_dir, symlinks=True)
        self._run(second, run_dir, END, "ckpt_path=last")
        return losses_of(run_dir)

    def _run(self, place: Place, run_dir: Path, steps: int, *more: str) -> None:
        run_command(command(place, run_dir, steps, *more), environment_of(threads_per_rank(place.ranks)), self._folder)


def compare(whole: dict[int, float], moved: dict[int, float]) -> float:
    """Largest relative difference of the losses after the change.

    Raises:
        RuntimeError: if the steps are not exactly those that were left.
    """
    left = sorted(whole)[STOP:]
    if sorted(moved) != left:
        raise RuntimeError(f"the run that went on has the steps {sorted(moved)}, not {left}")
    return max(abs(moved[step] - whole[step]) / abs(whole[step]) for step in left)


def measure(pairs: Sequence[tuple[str, str]], folder: Path) -> list[dict[str, Any]]:
    """One row per pair."""
    runs = Runs(folder)
    whole = runs.whole()
    rows = []
    for first, second in pairs:
        moved = runs.moved(PLACES[first], PLACES[second])
        worst = compare(whole, moved)
        rows.append(
            {
                "stopped under": first,
                "went on under": second,
                "ranks": f"{PLACES[first].ranks} to {PLACES[second].ranks}",
                "loss at the end": round(moved[max(moved)], 5),
                "not stopped": round(whole[max(whole)], 5),
                "worst relative difference": f"{worst:.1e}",
                "worst": worst,
            }
        )
        say(f"{first} -> {second}: {worst:.1e}")
    return rows


def main() -> None:
    """Run all pairs and print the table; ends with 1 if a loss differs by more than 1e-5."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume_anywhere", description=__doc__)
    parser.add_argument("--pairs", type=int, default=len(PAIRS), help="how many, from the first (default: all)")
    options = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="trainwright-benchmark-") as name:
        rows = measure(PAIRS[: options.pairs], Path(name))
    worst = max(row["worst"] for row in rows)
    shown = [{key: value for key, value in row.items() if key != "worst"} for row in rows]
    goal = Goal("largest relative difference of a loss after the change", worst, TOLERANCE)
    title = f"Losses of steps {STOP + 1} to {END}, against the run on one process that never stopped"
    finish("resume_anywhere", [table_of(title, shown)], [goal], {"rows": rows})
    sys.exit(0 if goal.holds else 1)


if __name__ == "__main__":
    main()
