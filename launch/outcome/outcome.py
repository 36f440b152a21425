"""How an attempt ended, by what its ranks have left in the folder of its records."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError
from trainwright.core.failures.records import read_attempt_start, read_result, read_steps
from trainwright.core.run.interrupt import Interrupted
from trainwright.launch.outcome.ending import notices, told_to_end
from trainwright.launch.recovery.restarts import Setback, setback_of

LOOK_SECONDS = 1.0
"""Between two looks at whether the ranks of an attempt shall be ended, to go on with other ones."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        failure: what ended it; None: all went well, or it was ended to go on with other ranks.
        metrics: that rank 0 ended with, by name; None where the run has not come to its end.
    """

    failure: RankError | None = None
    metrics: dict[str, float] | None = None


def setback_in(records: Path, failure: RankError) -> Setback:
    """What the policy must know of the failure of an attempt.

    Args:
        records: its folder.
        failure: what ended it.
    """
    steps, beginning = read_steps(records), read_attempt_start(records)
    step = steps.get(failure.rank, max(steps.values(), default=None))
    return setback_of(failure, step, None if beginning is None else beginning.step)


def metrics_in(records: Path, cfg: DictConfig, number: int = signal.SIGTERM) -> dict[str, float]:
    """The metrics of ranks that have all ended well; none where the user's own code ended them.

    Args:
        records: the folder of the attempt.
        cfg: its resolved configuration.
        number: of the signal that they were told to end by, if they were.

    Raises:
        Interrupted: if they were told to end, which the configuration calls well.
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
    """The metrics, where the ranks were through already when they were told to end.

    Args:
        records: the folder of the attempt.
        cfg: its resolved configuration.
        codes: exit codes of the ranks, by rank; None: not known.
        interrupted: how the launching process was told to end.
        failure: gives the error of the rank that failed first.

    Raises:
        Interrupted: where they were not.
        RankError: where they should have saved, and one failed at it.
    """
    if codes and all(code == 0 for code in codes.values()):
        return metrics_in(records, cfg, interrupted.number)
    told = told_to_end(cfg, codes)
    if told is None and codes and interrupted.number in notices(cfg):
        error = failure()
        if error.is_cause:
            raise error
    raise told or interrupted
