"""Seconds from typing a command to the end of the first optimizer step, on one process and on two.

The gpt recipe (nano, CPU) by ``trainwright fit``, by a script in plain torch (under torchrun for two), and by a script
with Lightning's Trainer. The moment is written by the ranks; the slowest counts. Loggers, monitors and the run
directory are part of ours.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.alternate import alternate
from benchmarks.commands import environment_of, run_command
from benchmarks.peers.moment import MOMENT_FOLDER, read_moments
from benchmarks.ranks import end_on_sigterm, threads_per_rank
from benchmarks.report import Goal, finish, say, seconds_rows, table_of

MOST_SECONDS_FOR_TWO = 6.0
_MICRO_BATCH = 4


def ours(processes: int, folder: Path) -> list[str]:
    """``trainwright fit`` with one callback more, which writes the moment."""
    return [
        *(sys.executable, "-m", "trainwright", "fit", "recipe=gpt"),
        f"strategy={'ddp' if processes > 1 else 'single'}",
        f"devices={processes}",
        "accelerator=cpu",
        "max_steps=1",
        f"global_batch_size={_MICRO_BATCH * processes}",
        f"run_dir={folder / 'run'}",
        "callbacks.sample=null",  # it comes after the step
        "+callbacks.first_step._target_=benchmarks.peers.first_step.FirstStep",
    ]


def torchrun(processes: int, folder: Path) -> list[str]:
    """The script in plain torch; torchrun where there are several processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, *(launcher if processes > 1 else []), "-m", "benchmarks.peers.start_plain"]


def lightning(processes: int, folder: Path) -> list[str]:
    """The script with Lightning's Trainer, which starts its ranks itself."""
    return [sys.executable, "-m", "benchmarks.peers.start_lightning", str(processes)]


SIDES = {"torchrun, bare loop": torchrun, "Lightning Trainer": lightning, "trainwright fit": ours}


def seconds_to_first_step(side: str, processes: int) -> float:
    """Start the command and wait for its end; seconds until the slowest rank had made its first step.

    Raises:
        RuntimeError: with what the command printed, if it failed or fewer ranks than asked for made a step.
    """
    with tempfile.TemporaryDirectory(prefix="trainwright-benchmark-") as name:
        folder, moments = Path(name), Path(name, "moments")
        moments.mkdir()
        environment = {**environment_of(threads_per_rank(processes)), MOMENT_FOLDER: str(moments)}
        begin = time.monotonic()
        printed = run_command(SIDES[side](processes, folder), environment, folder)
        found = read_moments(moments)
        if len(found) != processes:
            raise RuntimeError(f"{side}: {len(found)} of {processes} rank(s) made a step. It printed:\n{printed}")
        return max(found) - begin


def measure(processes: int, repeats: int) -> list[dict[str, Any]]:
    """One row per side: median, least and most seconds."""
    sides = {side: partial(seconds_to_first_step, side, processes) for side in SIDES}
    for side in sides.values():
        side()  # files get cached, and the text is joined once
    taken = alternate(sides, repeats, lambda seconds: f"{seconds:.1f} s")
    return seconds_rows(taken, processes=processes)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    parser.add_argument("--repeats", type=int, default=5, help="starts of each side (default: %(default)s)")
    options = parser.parse_args()
    end_on_sigterm()
    rows: list[dict[str, Any]] = []
    for processes in options.processes:
        say(f"{processes} process(es)")
        rows += measure(processes, options.repeats)
    goals = [
        Goal("seconds to the first step of trainwright fit, 2 processes", row["seconds"], MOST_SECONDS_FOR_TWO)
        for row in rows
        if row["processes"] == 2 and row["side"] == "trainwright fit"
    ]
    title = f"Command to the end of the first optimizer step, seconds, medians of {options.repeats} starts"
    finish("startup", [table_of(title, rows)], goals, {"rows": rows})


if __name__ == "__main__":
    main()
