"""How much of its steps a run keeps when ranks die, hang, raise, compute NaN or lose their connections.

A run on three replicas makes so many steps as take the given minutes without faults; the same command is run with a
fault every 20 to 30 seconds of that time, of kinds, ranks and steps drawn from a seed. Both are timed by the steps
themselves, from the first to the last, so that starting is not counted. Then one run per kind of fault is made under
recovery by restart, and short runs with and without all protection are made in turns.

What is printed: steps kept (time without faults by time with faults, for the same steps), seconds lost per kind of
fault for both ways of recovery, whether each step was made of the samples of the undisturbed run, the difference
of the logged losses from the undisturbed run, and what the protection costs when nothing fails.

Connections between processes of one machine are shut down for a partition; network namespaces are not used.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.commands import environment_of, started
from benchmarks.ranks import end_on_sigterm
from benchmarks.report import Goal, finish, say, table_of

RANKS = 3
KINDS = ("kill", "stop", "raise", "nan", "partition", "kill")
EVERY_SECONDS = (20.0, 30.0)
_RECIPE = """# @package _global_
name: soak
max_epochs: null
max_steps: 100
micro_batch_size: 2
global_batch_size: 12
seed: 5
module: {_target_: benchmarks.soaked.Net}
data: {_target_: benchmarks.soaked.Data, batch_size: "${micro_batch_size}"}
callbacks: {clock: {_target_: benchmarks.soaked.Clock}}
"""
_BARE = ("launch.max_restarts=0", "launch.hang_timeout=null", "checkpoint=none")
# Every protection at once.
_DEFAULTS = ("launch=resilient", "guard=rollback", "checkpoint=last")
# For a run whose failures come every 25 seconds, and NaN every 150.
_PROTECTED = (
    *_DEFAULTS,
    "launch.mtbf=0.007",
    "launch.backoff_seconds=0",
    "guard.loss.threshold=null",
    "guard.loss.mtbf=0.04",
    "checkpoint.last.every_n_seconds=10",
)
# A run that is started again must save; this one does at its end alone.
_WATCHED = ("launch=resilient", "checkpoint=last", "checkpoint.last.every_n_steps=1000000")
# Each with what the ones before it have.
PARTS = {
    "none": _BARE,
    "watching": _WATCHED,
    "guard": (*_WATCHED, "guard=skip"),
    "copies": (*_WATCHED, "guard=rollback"),
    "checkpoints": _DEFAULTS,
    "replicas": (*_DEFAULTS, "launch.recovery=replicas"),
}
REPLICAS = ("launch.recovery=replicas", "launch.spares=1")
_END_STEPS = 100
RESTART = ("launch.recovery=restart",)


@dataclass(frozen=True)
class Planned:
    """A fault of the soak.

    Args:
        kind: of :data:`KINDS`.
        rank: to whom.
        step: before which optimizer step, counted from 0.
    """

    kind: str
    rank: int
    step: int

    @property
    def sentence(self) -> str:
        """As it is typed after ``+inject=``."""
        where = f"rank={self.rank}, at_step={self.step}"
        return {
            "kill": f"kill({where})",
            "stop": f"stop({where})",
            "raise": f'raise_in("on_before_optimizer_step", {where})',
            "nan": f'nan({where}, where="gradient")',
            "partition": f"partition(ranks=[{self.rank}], at_step={self.step})",
        }[self.kind]


def plan(seed: int, steps: int, per_second: float) -> list[Planned]:
    """The faults of a soak: one every 20 to 30 seconds of undisturbed time, kinds in turn, ranks at random."""
    draw, after, faults = random.Random(seed), 0.0, []
    while (step := round((after := after + draw.uniform(*EVERY_SECONDS)) * per_second)) < steps - 2:
        faults.append(Planned(KINDS[len(faults) % len(KINDS)], draw.randrange(RANKS), step))
    return faults


class Timeline:
    """Records of the clocks of a run's processes.

    Args:
        run_dir: of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.made: dict[int, float] = {}
        """Step -> when it was made first."""
        self.cpu_seconds = 0.0
        """That all processes took between the first and the last step of each."""
        # Step -> ranks that made it together -> data rank -> samples; and when such ranks were last heard of.
        self._read: dict[int, dict[tuple[int, ...], dict[int, list[int]]]] = defaultdict(dict)
        self._heard: dict[tuple[int, ...], float] = {}
        for path in (run_dir / "clock").glob("*.jsonl"):
            self._take([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])

    def _take(self, lines: list[tuple[float, float, list[int], int, int, list[int], bool]]) -> None:
        """Read the records of one process, in order of time."""
        before = -1
        if lines:
            self.cpu_seconds += lines[-1][1] - lines[0][1]
        for when, _, generation, step, data_rank, samples, stepped in lines:
            together = tuple(generation)
            if stepped:
                self.made[step] = min(when, self.made.get(step, when))
            self._heard[together] = max(when, self._heard.get(together, when))
            if step < before:  # it went back in memory, and makes these steps again
                for later in range(step, before + 1):
                    self._read[later].get(together, {}).pop(data_rank, None)
            before = step
            self._read[step].setdefault(together, {}).setdefault(data_rank, []).extend(samples)

    @property
    def seconds(self) -> float:
        """From the first step to the last."""
        return max(self.made.values()) - min(self.made.values())

    def samples(self) -> dict[int, list[int]]:
        """Samples that each step was made of, sorted: those of the last ranks that made it."""
        found = {}
        for step, by_ranks in self._read.items():
            last = max(by_ranks, key=lambda together: self._heard[together])
            found[step] = sorted(sample for own in by_ranks[last].values() for sample in own)
        return found

    def lost(self, fault: Planned, until: int, per_step: float) -> float:
        """Seconds from a fault to step ``until`` beyond what these steps take."""
        first = max(step for step in self.made if step < fault.step)
        last = max(step for step in self.made if step <= until)
        return self.made[last] - self.made[first] - (last - first) * per_step


def losses(run_dir: Path) -> dict[int, float]:
    """Loss of each step as it was logged."""
    found = {}
    for path in sorted(run_dir.glob("metrics*.csv")):
        with path.open(encoding="utf-8") as file:
            found.update({int(row["step"]): float(row["loss"]) for row in csv.DictReader(file) if row.get("loss")})
    return found


@dataclass
class Bench:
    """Commands in a folder of their own.

    Args:
        folder: for the runs.
        threads: CPU threads of each rank.
        patience: seconds after which a run is taken to hang.
    """

    folder: Path
    threads: int
    patience: float

    def run(self, name: str, steps: int, *words: str) -> Timeline:
        """Run a command to its end, again if a signal made it end early; what its clocks say."""
        run_dir = self.folder / name
        command = [sys.executable, "-m", "trainwright", "fit", "recipe=soak", "--config-dir", str(self.folder / "conf")]
        command += [f"run_dir={run_dir}", f"max_steps={steps}", "strategy=ddp", f"devices={RANKS}", *words]
        code, printed = self._once([*command, "resume=auto"] if "checkpoint=none" not in words else command)
        if code != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{printed[-6000:]}")
        return Timeline(run_dir)

    def _once(self, command: Sequence[str]) -> tuple[int, str]:
        with (self.folder / "printed.log").open("w+", encoding="utf-8") as out:
            with started(command, environment_of(self.threads), self.folder, out) as process:
                code = process.wait(self.patience)
            out.seek(0)
            return code, out.read()

    def preempted(self, name: str, steps: int, at_step: int, *words: str) -> tuple[Timeline, float]:
        """A run that gets SIGTERM after a step and is started again at once; seconds it lost beyond its steps."""
        run_dir = self.folder / name
        command = [sys.executable, "-m", "trainwright", "fit", "recipe=soak", "--config-dir", str(self.folder / "conf")]
        command += [f"run_dir={run_dir}", f"max_steps={steps}", "strategy=ddp", f"devices={RANKS}", *words]
        with started(
            [*command, "resume=auto"], environment_of(self.threads), self.folder, subprocess.DEVNULL
        ) as process:
            end = time.monotonic() + self.patience
            while process.poll() is None and time.monotonic() < end:
                if (run_dir / "clock").exists() and max(Timeline(run_dir).made, default=0) >= at_step:
                    process.send_signal(signal.SIGTERM)
                    break
                time.sleep(0.2)
            code = process.wait(self.patience)
        if code != 128 + signal.SIGTERM:
            raise RuntimeError(f"SIGTERM ended the run with {code}, not {128 + signal.SIGTERM}")
        return self.run(name, steps, *words), float(at_step)


def soak(bench: Bench, minutes: float, seed: int) -> dict[str, Any]:
    """The run with faults against the run without."""
    pace = bench.run("pace", 150, *_PROTECTED, *REPLICAS)
    per_second = 149 / pace.seconds
    steps = max(60, round(minutes * 60 * per_second))
    faults = plan(seed, steps, per_second)
    say(f"{per_second:.1f} steps a second; {steps} steps, {len(faults)} faults: {[f.sentence for f in faults]}")
    undisturbed = bench.run("undisturbed", steps, *_PROTECTED, *REPLICAS)
    say(f"undisturbed: {undisturbed.seconds:.1f} s")
    inject = f"+inject=[{', '.join(fault.sentence for fault in faults)}]"
    disturbed = bench.run("disturbed", steps, *_PROTECTED, *REPLICAS, inject)
    say(f"disturbed: {disturbed.seconds:.1f} s")
    per_step = undisturbed.seconds / (steps - 1)
    ends = [fault.step - 1 for fault in faults[1:]] + [steps - 1]
    lost = defaultdict(list)
    for fault, end in zip(faults, ends, strict=True):
        lost[fault.kind].append(disturbed.lost(fault, end, per_step))
    return {
        "steps": steps,
        "faults": len(faults),
        "undisturbed_seconds": undisturbed.seconds,
        "disturbed_seconds": disturbed.seconds,
        "kept": undisturbed.seconds / disturbed.seconds,
        "lost": {kind: [round(seconds, 2) for seconds in of_kind] for kind, of_kind in lost.items()},
        "same_samples": disturbed.samples() == undisturbed.samples(),
        **_differences(bench.folder / "undisturbed", bench.folder / "disturbed"),
        "per_step": per_step,
    }


def _differences(one: Path, other: Path) -> dict[str, float]:
    """Differences of the losses that both have logged, by the first loss; infinite if one lacks a step of the other.

    New groups add in another order (buckets are built anew), and training amplifies that over thousands of steps, so
    single losses part in the end while their mean does not.
    """
    first, second = losses(one), losses(other)
    if first.keys() != second.keys():
        return {"end_difference": float("inf"), "early_difference": float("inf")}
    steps, scale = sorted(first), first[min(first)]
    ends = [sum(each[step] for step in steps[-_END_STEPS:]) / _END_STEPS for each in (first, second)]
    early = max(abs(first[step] - second[step]) for step in steps[:_END_STEPS])
    return {"end_difference": abs(ends[0] - ends[1]) / scale, "early_difference": early / scale}


def restarts(bench: Bench, per_step: float) -> dict[str, float]:
    """Seconds that one fault of each kind costs where all ranks start anew."""
    found = {}
    steps, at = 120, 60
    for kind in dict.fromkeys(KINDS):
        fault = Planned(kind, 1, at)
        run = bench.run(f"restart_{kind}", steps, *_PROTECTED, *RESTART, f"+inject={fault.sentence}")
        found[kind] = run.lost(fault, steps - 1, per_step)
        say(f"restart after {kind}: {found[kind]:.1f} s")
    run, at_step = bench.preempted("restart_sigterm", steps, at, *_PROTECTED, *RESTART)
    found["SIGTERM, started again"] = run.lost(Planned("kill", 0, int(at_step)), steps - 1, per_step)
    return found


def protection(bench: Bench, rounds: int, steps: int = 200) -> dict[str, list[tuple[float, float]]]:
    """Seconds on the clock and of CPU per step in each round, of a run with no protection and with one part more each.

    The CPU time is that of all ranks.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in PARTS}
    for number in range(rounds):
        order = list(PARTS) if number % 2 == 0 else list(PARTS)[::-1]
        for name in order:
            run = bench.run(f"{name}_{number}".replace(" ", "_"), steps, *PARTS[name])
            taken[name].append((run.seconds / (steps - 1), run.cpu_seconds / (steps - 1)))
        say(f"round {number + 1}: " + ", ".join(f"{name} {1000 * taken[name][-1][0]:.1f} ms" for name in PARTS))
    return taken


def rows_of_parts(taken: Mapping[str, Sequence[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Return the cost that each part adds to a step and the cumulated cost; medians over the rounds."""
    rows, before = [], taken["none"]
    for name, own in taken.items():
        rows.append(
            {
                "protection": name,
                "step, ms": round(1000 * median(wall for wall, _ in own), 2),
                "adds, ms": round(1000 * _median_of(own, before, lambda one, other: one[0] - other[0]), 2),
                "adds, CPU ms": round(1000 * _median_of(own, before, lambda one, other: one[1] - other[1]), 2),
                "by none": round(_median_of(own, taken["none"], lambda one, other: one[0] / other[0]), 4),
                "CPU by none": round(_median_of(own, taken["none"], lambda one, other: one[1] / other[1]), 4),
            }
        )
        before = own
    return rows


_Costs = Sequence[tuple[float, float]]


def _median_of(own: _Costs, others: _Costs, compare: Callable[[Any, Any], float]) -> float:
    return median(compare(one, other) for one, other in zip(own, others, strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="of undisturbed training (default 5)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument("--rounds", type=int, default=4, help="of short runs with and without protection")
    parser.add_argument("--skip", choices=("soak", "restarts", "protection"), action="append", default=[])
    arguments = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="goodput-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        recipes = folder / "conf" / "recipe"
        recipes.mkdir(parents=True)
        (recipes / "soak.yaml").write_text(_RECIPE, encoding="utf-8")
        _measure(Bench(folder, 1, 600 + 300 * arguments.minutes), arguments)


def _measure(bench: Bench, arguments: argparse.Namespace) -> None:
    tables, goals, result = [], [], {}
    per_step = 0.1
    if "soak" not in arguments.skip:
        result["soak"] = soaked = soak(bench, arguments.minutes, arguments.seed)
        per_step = soaked["per_step"]
        rows = [
            {"fault": kind, "times": len(lost), "seconds lost, median": round(median(lost), 2), "most": max(lost)}
            for kind, lost in soaked["lost"].items()
        ]
        tables.append(table_of(f"replicas go on in their processes ({soaked['faults']} faults)", rows))
        goals += [
            Goal("steps kept with a fault every 20 to 30 s", soaked["kept"], 0.97, at_least=True),
            Goal("difference of the mean of the last 100 losses, by the first loss", soaked["end_difference"], 1e-3),
            Goal("steps made of the same samples (1 = all)", float(soaked["same_samples"]), 1.0, at_least=True),
        ]
    if "restarts" not in arguments.skip:
        result["restarts"] = found = restarts(bench, per_step)
        rows = [{"fault": kind, "seconds lost": round(seconds, 2)} for kind, seconds in found.items()]
        tables.append(table_of("all ranks start anew from the newest checkpoint", rows))
    if "protection" not in arguments.skip:
        result["protection"] = taken = protection(bench, arguments.rounds)
        rows = rows_of_parts(taken)
        tables.append(table_of("when nothing fails, each line with what the lines above have", rows))
        goals.append(Goal("time with all protection by time without", rows[-1]["by none"], 1.01))
    finish("goodput", tables, goals, result)


if __name__ == "__main__":
    main()
