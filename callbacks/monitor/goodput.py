"""How much of the time made steps that count."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from trainwright.callbacks.monitor.records import read_records, records_path, tell
from trainwright.callbacks.steps import log_metrics, steps_done


@dataclass(frozen=True)
class Stretch:
    """Steps in a row, and the seconds that they took.

    Args:
        begin: optimizer steps done before the first of them.
        end: after the last.
        seconds: of all of them.
    """

    begin: int
    end: int
    seconds: float

    def until(self, step: int) -> Stretch | None:
        """What is left of it where training goes on from ``step``; ``None``: nothing."""
        if step >= self.end:
            return self
        if step <= self.begin:
            return None
        return Stretch(self.begin, step, self.seconds * (step - self.begin) / (self.end - self.begin))


class Goodput(Callback):
    """Log the part of the time since the run began that made optimizer steps which count, as ``goodput``.

    A step counts if no later one has taken its place: steps that were made again, since training went back or the run
    was started again from a checkpoint, count once. What was spent on checkpoints, validation, starting, lost steps and
    standing still does not count. Times of steps are those of ``StepTime``, which must be there.

    Rank 0 alone tells it, as a record ``goodput`` (``share``, ``counted`` and ``wall`` in seconds, ``began`` in unix
    seconds). A run that goes on in its directory remembers by its own records what it did before.

    Args:
        run_dir: of the run; ``None``: what was before this process is not known.
    """

    looks_at_parameters = False

    def __init__(self, run_dir: str | None = None) -> None:
        self.run_dir = run_dir
        self.latest: dict[str, float] = {}
        """What was told last; empty before the first window of ``StepTime`` has ended."""
        self._began = 0.0
        self._stretches: list[Stretch] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remember what was before."""
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

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget steps that are made again."""
        self._forget_after(trainer)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget steps that are made again."""
        self._forget_after(trainer)

    def on_record(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        """Count steps, and tell."""
        if record["kind"] != "step" or not trainer.is_global_zero:
            return
        self._add(record)
        wall = max(float(record["time"]) - self._began, 1e-9)
        counted = sum(each.seconds for each in self._stretches)
        self.latest = {"share": counted / wall, "counted": counted, "wall": wall, "began": self._began}
        tell(trainer, "goodput", self.latest, int(record["step"]))
        log_metrics(trainer, {"goodput": self.latest["share"]}, int(record["step"]) - 1)

    def _add(self, record: Mapping[str, Any]) -> None:
        end, steps = int(record["step"]), int(record["steps"])
        seconds = float(record["total"]) - float(record["seconds"]["checkpoint"])
        self._cut(end - steps)  # in the records of a run that went back, steps stand twice
        last = self._stretches[-1] if self._stretches else None
        if last is not None and last.end == end - steps and len(self._stretches) > _MOST:
            # Long ago, how long each took tells nothing that is needed.
            first, second = self._stretches[:2]
            self._stretches[:2] = [Stretch(first.begin, second.end, first.seconds + second.seconds)]
        self._stretches.append(Stretch(end - steps, end, seconds))

    def _forget_after(self, trainer: Trainer) -> None:
        self._cut(steps_done(trainer))

    def _cut(self, step: int) -> None:
        left = (each.until(step) for each in self._stretches)
        self._stretches = [each for each in left if each is not None]


# Stretches that are known apart.
_MOST = 1000
