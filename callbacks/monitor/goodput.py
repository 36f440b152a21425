"""Goodput: the fraction of time spent on steps that count."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from trainwright.callbacks.monitor.records import publish, read_records, records_path
from trainwright.callbacks.steps import steps_done

# Stretches kept apart; older ones are merged.
_MOST = 1000


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps.

    Args:
        begin: optimizer steps done before the first of them.
        end: after the last.
        seconds: of all of them.
    """

    begin: int
    end: int
    seconds: float

    def until(self, step: int) -> Stretch | None:
        """Return the part of it up to ``step``; ``None`` if there is none."""
        if step >= self.end:
            return self
        if step <= self.begin:
            return None
        return Stretch(self.begin, step, self.seconds * (step - self.begin) / (self.end - self.begin))


class Goodput(Callback):
    """Log the fraction of the time since the run began that was spent on optimizer steps which count, as ``goodput``.

    Steps repeated after a rollback or a restart count once. Checkpoints, validation, startup, lost steps and downtime
    do not count. Times come from ``StepTime``, which is required.

    Rank 0 emits a ``goodput`` record (``share``, ``counted`` and ``wall`` in seconds, ``began`` in unix seconds). A run
    resumed in its directory reads its earlier records.

    Args:
        run_dir: of the run; ``None``: earlier processes are not counted.

    Attributes:
        latest: the last record; empty before the end of the first window of ``StepTime``.
    """

    def __init__(self, run_dir: str | None = None) -> None:
        self.run_dir = run_dir
        self.latest: dict[str, float] = {}
        self._began = 0.0
        self._stretches: list[Stretch] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read earlier records."""
        if stage != "fit" or not trainer.is_global_zero:
            return
        self._began, self._stretches = time.time(), []
        if self.run_dir is None:
            return
        for record in read_records(records_path(self.run_dir, trainer.global_rank)):
            if record["kind"] == "goodput":
                self._began = min(self._began, float(record["began"]))
            elif record["kind"] == "step":
                self._add(record)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop steps that will be repeated."""
        self._cut(steps_done(trainer))

    on_train_start = on_gone_back

    def on_record(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        """Count steps, and report."""
        if record["kind"] != "step" or not trainer.is_global_zero:
            return
        self._add(record)
        wall = max(float(record["time"]) - self._began, 1e-9)
        counted = sum(each.seconds for each in self._stretches)
        self.latest = {"share": counted / wall, "counted": counted, "wall": wall, "began": self._began}
        publish(trainer, int(record["step"]) - 1, "goodput", self.latest, {"goodput": self.latest["share"]})

    def _add(self, record: Mapping[str, Any]) -> None:
        end, steps = int(record["step"]), int(record["steps"])
        seconds = float(record["total"]) - float(record["seconds"]["checkpoint"])
        self._cut(end - steps)  # records of a rolled back run contain steps twice
        last = self._stretches[-1] if self._stretches else None
        if last is not None and last.end == end - steps and len(self._stretches) > _MOST:
            # The times of old steps are not needed one by one.
            first, second = self._stretches[:2]
            self._stretches[:2] = [Stretch(first.begin, second.end, first.seconds + second.seconds)]
        self._stretches.append(Stretch(end - steps, end, seconds))

    def _cut(self, step: int) -> None:
        left = (each.until(step) for each in self._stretches)
        self._stretches = [each for each in left if each is not None]
