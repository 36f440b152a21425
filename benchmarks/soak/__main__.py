"""Soak test: does a ``kill -9`` ever lose a checkpoint, or leave a process, a file or shared memory behind?

Runs on two ranks save after every step, keep the newest checkpoints, and are killed again and again: during saves,
deletions and recoveries, one rank, every rank or the process that launched them, under DDP, ZeRO-3 and a pipeline, with
blocking and with asynchronous saves. After each command every checkpoint is read and compared byte by byte with that of
the same step of an undisturbed run. After its last kill a run continues to its end and must leave exactly the files of
an undisturbed run.

A command resumes with ``resume=auto``; some restart their ranks themselves after all kills but the last. Processes are
forked from this one, which has imported everything (``forked.py``). Kill times are drawn from the seed: at a change of
the file system within a phase, or some time after one (``killer.py``).

The exit code is 1 if a goal is missed. Violations are printed with the number of their run, which ``--first`` repeats,
and the run directory is kept.
"""

from __future__ import annotations

import os

# Before torch is imported: a process with threads could not be forked.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ranks import end_on_sigterm
from benchmarks.report import Goal, finish, say, table_of
from benchmarks.soak.bench import KILLS_OF_A_RUN, Bench, Story
from benchmarks.soak.checks import ENDS, FILES, LOST, PROCESSES, SEGMENTS
from benchmarks.soak.forked import load
from benchmarks.soak.killer import COMMAND, DELETION, EVERY, RECOVERY, SAVE, STEP
from benchmarks.soak.left import adopt_orphans
from benchmarks.soak.plan import MODES, STRATEGIES, draw_run

_PHASES = (SAVE, DELETION, RECOVERY, STEP)
_LEFT = {
    LOST: "checkpoints lost or damaged",
    PROCESSES: "processes left",
    FILES: "files left",
    SEGMENTS: "shared-memory segments left",
    ENDS: "commands that did not end as they should",
}


def soak(bench: Bench, options: argparse.Namespace) -> list[Story]:
    """Make runs until there were enough kills, or it took too long."""
    end = time.monotonic() + options.seconds
    known = {strategy: bench.undisturbed(strategy) for strategy in options.strategies}
    for strategy, each in known.items():
        say(f"{strategy}: changes of the disk { ({phase: dict(of) for phase, of in each.instants.items()}) }")
    stories: list[Story] = []
    kills, number = 0, options.first
    while kills < options.kills and time.monotonic() < end:
        drawn = draw_run(options.seed, number, options.strategies, options.modes)
        most = min(KILLS_OF_A_RUN, options.kills - kills)
        stories.append(story := bench.run(drawn, known[drawn.strategy], most))
        kills, number = kills + len(story.kills), number + 1
        say(f"run {drawn.number}: {drawn.strategy}, {drawn.mode}, {len(story.kills)} kills; {kills} so far")
        for wrong in story.wrong:
            say(
                f"WRONG {wrong.kind}: {wrong.text} (repeat with --seed {options.seed} --first {drawn.number} --kills 1)"
            )
    return stories


def rows_of(stories: Sequence[Story]) -> list[dict[str, Any]]:
    """One row per strategy and mode, and one for all."""
    groups = {
        (strategy, mode): [story for story in stories if (story.drawn.strategy, story.drawn.mode) == (strategy, mode)]
        for strategy in STRATEGIES
        for mode in MODES
    }
    rows = [_row(*names, group) for names, group in groups.items() if group]
    return [*rows, _row("all", "", stories)]


def _row(strategy: str, mode: str, stories: Sequence[Story]) -> dict[str, Any]:
    phases = Counter(phase for story in stories for phase, _ in story.kills)
    victims = Counter(
        {COMMAND: "command", EVERY: "all ranks"}.get(victim, "one rank")
        for story in stories
        for _, victim in story.kills
    )
    wrong = wrong_of(stories)
    return {
        "strategy": strategy,
        "mode": mode,
        "kills": sum(phases.values()),
        **{phase: phases[phase] for phase in _PHASES},
        **{name: victims[name] for name in ("one rank", "all ranks", "command")},
        "lost": wrong[LOST],
        "left": sum(wrong[kind] for kind in (PROCESSES, FILES, SEGMENTS)),
    }


def wrong_of(stories: Sequence[Story]) -> Counter[str]:
    """How often each kind of thing was wrong."""
    return Counter(wrong.kind for story in stories for wrong in story.wrong)


def main() -> int:
    """Kill, check and print; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000, help="so many (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no run begins later (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first run (default: %(default)s)")
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    options = parser.parse_args()
    end_on_sigterm()
    load("benchmarks.soaked")
    adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    bench, stories = Bench(folder), []
    begin = time.monotonic()
    try:
        stories = soak(bench, options)
    finally:
        bench.family.end()
        if not wrong_of(stories):
            shutil.rmtree(folder)
    return _print(stories, options, time.monotonic() - begin, folder)


def _print(stories: Sequence[Story], options: argparse.Namespace, seconds: float, folder: Path) -> int:
    kills, wrong = sum(len(story.kills) for story in stories), wrong_of(stories)
    goals = [Goal(name, wrong[kind], 0) for kind, name in _LEFT.items()]
    goals += [Goal("kills", kills, options.kills, at_least=True)]
    if wrong:
        say(f"kept: {folder}")
    rows = rows_of(stories)
    title = f"{kills} kills of {len(stories)} runs in {seconds:.0f} s, seed {options.seed}"
    finish("soak", [table_of(title, rows)], goals, {"rows": rows, "seconds": seconds, "seed": options.seed})
    return 0 if all(goal.holds for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
