"""Outcome of an attempt, from the records of its ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError
from trainwright.core.failures.records import read_beginning, read_result, read_steps
from trainwright.core.run.interrupt import Interrupted
from trainwright.launch.outcome.ending import notices, told_to_end
from trainwright.launch.recovery.restarts import Setback, setback_of

LOOK_SECONDS = 1.0
"""Seconds between checks whether to end the ranks of an attempt and continue on other devices."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of an attempt.

    Attributes:
        failure: that ended it; None = success, or ended to continue on other devices.
        metrics: final metrics of rank 0 by name; None = the run is not finished.
    """

    failure: RankError | None = None
    metrics: dict[str, float] | None = None


def setback_in(records: Path, failure: RankError) -> Setback:
    """Return the failure of an attempt in the terms of the policy.

    Args:
        records: its folder.
        failure: that ended it.
    """
    steps, beginning = read_steps(records), read_beginning(records)
    step = steps.get(failure.rank, max(steps.values(), default=None))
    return setback_of(failure, step, None if beginning is None else beginning.step)


def metrics_in(records: Path, cfg: DictConfig, number: int = signal.SIGTERM) -> dict[str, float]:
    """Return the metrics of ranks that have all exited successfully; empty where the user's code ended them.

    Args:
        records: the folder of the attempt.
        cfg: its resolved configuration.
        number: of the signal that interrupted them, if one did.

    Raises:
        Interrupted: if they were interrupted and preemption.exit_code is 0.
    """
    metrics = read_result(records)
    if metrics is None and cfg.preemption.exit_code == 0:
        raise Interrupted(number, 0)
    return metrics or {}


def metrics_after_signal(
    records: Path,
    cfg: DictConfig,
    codes: Mapping[int, int | None],
    interrupted: Interrupted,
    failure: Callable[[], RankError],
) -> dict[str, float]:
    """Return the metrics, if the ranks had finished before they were interrupted.

    Args:
        records: the folder of the attempt.
        cfg: its resolved configuration.
        codes: exit codes by rank; None = unknown.
        interrupted: the signal to the launching process.
        failure: returns the error of the rank that failed first.

    Raises:
        Interrupted: if they had not finished.
        RankError: if they should have saved, and one failed to.
    """
    if codes and all(code == 0 for code in codes.values()):
        return metrics_in(records, cfg, interrupted.number)
    told = told_to_end(cfg, codes)
    if told is None and codes and interrupted.number in notices(cfg):
        error = failure()
        if error.is_cause:
            raise error
    raise told or interrupted
