"""Runs of a module that records its samples and its final state."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.faults.recipes import restart_log
from trainwright.command.run import run
from trainwright.command.schema.compose import compose

STEPS = 30
RECIPE = f"""# @package _global_
name: survivor
max_epochs: null
max_steps: {STEPS}
micro_batch_size: 2
global_batch_size: 12
seed: 3
module: {{_target_: tests.faults.survivor.Net, width: 8, sleep: 0.0, full: 0}}
data: {{_target_: tests.faults.survivor.Data, batch_size: "${{micro_batch_size}}"}}
trainer: {{log_every_n_steps: 5}}
"""


class Survived:
    """Run of ``trainwright fit`` with ranks forked from the server of the suite, and its results.

    Args:
        conf: the configuration directory.
        run_dir: of the run.
        words: of the command line.

    Raises:
        RankError: if the run failed.
    """

    def __init__(self, conf: Path, run_dir: Path, *words: str) -> None:
        self.run_dir = run_dir
        run(compose("survivor", [f"run_dir={run_dir}", *words], conf))

    @property
    def log(self) -> str:
        """Text of the log of restarts."""
        return restart_log(self.run_dir)

    @property
    def losses(self) -> dict[int, float]:
        """Loss of each optimizer step, as logged; a step that was logged twice is an error."""
        with (self.run_dir / "metrics.csv").open(encoding="utf-8") as file:
            rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file) if row.get("loss")]
        steps = [step for step, _ in rows]
        assert len(steps) == len(set(steps)), f"logged twice: {sorted(s for s in set(steps) if steps.count(s) > 1)}"
        return dict(rows)

    def _lines(self, kind: str) -> Iterator[tuple[str, list[Any]]]:
        for path in sorted((self.run_dir / kind).glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                yield path.name, json.loads(line)

    @property
    def read(self) -> dict[int, list[int]]:
        """Samples that each optimizer step was made of, sorted: those of the last generation that made it."""
        found: dict[tuple[int, int, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for process, (generation, step, data_rank, samples) in self._lines("read"):
            found[step, generation, data_rank][process] += samples
        last = {step: max(generation for at, generation, _ in found if at == step) for step, _, _ in found}
        read: dict[int, list[int]] = defaultdict(list)
        for (step, generation, _), by_process in found.items():
            if generation == last[step]:
                first = next(iter(by_process.values()))
                # Stages of a pipeline read the same, and look at the first micro-batch of a run beforehand.
                read[step] += dict.fromkeys(first) if len(by_process) > 1 else first
        return {step: sorted(samples) for step, samples in sorted(read.items())}

    @property
    def common(self) -> dict[tuple[int, int], list[tuple[str, str, str]]]:
        """State of local-update replicas at the start of steps, by generation and step, in the order of ranks.

        Digests of the common parameters, of the outer momentum, and of the rank's own parameters.
        """
        found: dict[tuple[int, int], dict[int, tuple[str, str, str]]] = defaultdict(dict)
        for _, (generation, step, rank, common, momentum, own) in self._lines("common"):
            found[generation, step].setdefault(rank, (common, momentum, own))
        return {key: [of for _, of in sorted(ranks.items())] for key, ranks in sorted(found.items())}

    def ends(self) -> list[dict[str, Any]]:
        """Return the final state of each rank of the last generation."""
        paths = sorted(self.run_dir.glob("end_*.json"))
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]
