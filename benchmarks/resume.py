"""Seconds from a command to the end of its first optimizer step: of a fresh run, and of one that resumes.

The gpt recipe (nano, CPU, two processes). ``trainwright fit`` from the start, with ``ckpt_path=last`` under the same
layout and under another one; Lightning's Trainer from the start and with ``ckpt_path``. The cost of resuming is the
difference.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.alternate import alternate
from benchmarks.commands import environment_of, run_command
from benchmarks.peers.moment import MOMENT_FOLDER, read_moments
from benchmarks.ranks import end_on_sigterm, threads_per_rank
from benchmarks.report import Goal, finish, seconds_rows, table_of

_PROCESSES = 2
FRESH, SAME, OTHER = "trainwright fit", "trainwright fit ckpt_path=last", "the same under another layout (zero3)"
LIGHTNING, LIGHTNING_ON = "Lightning Trainer", "Lightning Trainer, ckpt_path"


def ours(run_dir: Path, strategy: str, steps: int, *more: str) -> list[str]:
    """``trainwright fit`` with one callback more, which writes the moment."""
    return [
        *(sys.executable, "-m", "trainwright", "fit", "recipe=gpt", f"strategy={strategy}", f"devices={_PROCESSES}"),
        *("accelerator=cpu", f"max_steps={steps}", "global_batch_size=8", f"run_dir={run_dir}"),
        "callbacks.sample=null",  # it comes after the step
        "+callbacks.first_step._target_=benchmarks.peers.first_step.FirstStep",
        *more,
    ]


def lightning(*more: str) -> list[str]:
    """The script with Lightning's Trainer."""
    return [sys.executable, "-m", "benchmarks.peers.start_lightning", str(_PROCESSES), *more]


def seconds_to_first_step(make: Callable[[Path], list[str]]) -> float:
    """Seconds until the slowest rank has made its first step.

    Args:
        make: gives the command for an empty folder.

    Raises:
        RuntimeError: with what the command printed, if it failed or a rank made no step.
    """
    with tempfile.TemporaryDirectory(prefix="trainwright-benchmark-") as name:
        folder, moments = Path(name), Path(name, "moments")
        moments.mkdir()
        command = make(folder)
        environment = {**environment_of(threads_per_rank(_PROCESSES)), MOMENT_FOLDER: str(moments)}
        begin = time.monotonic()
        printed = run_command(command, environment, folder)
        found = read_moments(moments)
        if len(found) != _PROCESSES:
            raise RuntimeError(f"{len(found)} of {_PROCESSES} ranks made a step. The command printed:\n{printed}")
        return max(found) - begin


def sides(saved: Path) -> dict[str, Callable[[Path], list[str]]]:
    """Command of each side, for an empty folder; ``saved`` holds what two of them go on from."""

    def going_on(strategy: str, folder: Path) -> list[str]:
        shutil.copytree(saved / "run", folder / "run", symlinks=True)
        return ours(folder / "run", strategy, 2, "ckpt_path=last")

    return {
        FRESH: lambda folder: ours(folder / "run", "ddp", 1),
        SAME: partial(going_on, "ddp"),
        OTHER: partial(going_on, "zero3"),
        LIGHTNING: lambda folder: lightning(),
        LIGHTNING_ON: lambda folder: lightning("--resume", str(saved / "lightning.ckpt")),
    }


def prepare(saved: Path) -> None:
    """Train one step with both and save."""
    (saved / "moments").mkdir()
    environment = {**environment_of(threads_per_rank(_PROCESSES)), MOMENT_FOLDER: str(saved / "moments")}
    run_command(ours(saved / "run", "ddp", 1), environment, saved)
    run_command(lightning("--save", str(saved / "lightning.ckpt")), environment, saved)


def measure(repeats: int) -> list[dict[str, Any]]:
    """One row per side: median, least and most seconds."""
    with tempfile.TemporaryDirectory(prefix="trainwright-benchmark-") as name:
        prepare(Path(name))
        runs = {side: partial(seconds_to_first_step, make) for side, make in sides(Path(name)).items()}
        taken = alternate(runs, repeats, lambda seconds: f"{seconds:.1f} s")
    return seconds_rows(taken)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="starts of each side (default: %(default)s)")
    options = parser.parse_args()
    end_on_sigterm()
    rows = measure(options.repeats)
    seconds = {row["side"]: row["seconds"] for row in rows}
    extra = seconds[SAME] - seconds[FRESH]
    ratio = seconds[SAME] / seconds[LIGHTNING_ON]
    goals = [Goal("seconds from the command to the first step of a resumed run, over Lightning's", ratio, 1.0)]
    title = f"Command to the end of the first optimizer step, seconds, medians of {options.repeats} starts"
    finish("resume", [table_of(title, rows)], goals, {"rows": rows, "seconds_that_going_on_adds": round(extra, 2)})


if __name__ == "__main__":
    main()
