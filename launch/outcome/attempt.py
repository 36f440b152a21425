"""One attempt of a run, for any launcher: its interface, and its outcome from the records of its ranks."""

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError
from trainwright.core.failures.records import AttemptStart, read_attempt_start, read_result, read_steps
from trainwright.core.run.interrupt import Interrupted
from trainwright.launch.outcome.interruption import exit_timeout, handled_signals, interruption_in
from trainwright.launch.ranks.supervisor import RankExit, Supervisor
from trainwright.launch.recovery.restarts import AttemptFailure, attempt_failure
from trainwright.launch.watchdog.monitor import HangMonitor

POLL_SECONDS = 1.0
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


@dataclass(eq=False)
class RankAttempt(ABC):
    """The ranks of a run from their start to the exit of the last.

    Attributes:
        cfg: the resolved configuration of this attempt.
        verb: fit, validate, test or predict.
        records: an empty folder for the records of the ranks.
        monitor: detects hangs; None = off.
    """

    cfg: DictConfig
    verb: str
    records: Path
    monitor: HangMonitor | None

    @abstractmethod
    def run(self, grace_after_failure: float, should_stop: Callable[[], bool] | None) -> Outcome:
        """Start the ranks and wait for all to exit.

        Args:
            grace_after_failure: seconds that the others have to exit after one has failed.
            should_stop: returns whether to end the ranks and continue on other devices; called every second. None =
                never.

        Returns:
            A failure, metrics, or neither where the ranks were ended to continue on other devices.

        Raises:
            Interrupted: if the ranks were interrupted.
        """

    @property
    def beginning(self) -> AttemptStart | None:
        """The start of training; None before it."""
        return read_attempt_start(self.records)

    def setback(self, failure: RankError) -> AttemptFailure:
        """Return a failure of this attempt in the terms of the policy."""
        steps, beginning = read_steps(self.records), self.beginning
        step = steps.get(failure.rank, max(steps.values(), default=None))
        return attempt_failure(failure, step, None if beginning is None else beginning.step)

    def explain(self, failure: RankError) -> RankError:
        """Return the failure, with the monitor's findings added."""
        text = None if self.monitor is None or failure.hang is not None else self.monitor.explain()
        return failure if text is None else failure.because(text)

    def close(self) -> None:
        """Release resources after the end."""
        if self.monitor is not None:
            self.monitor.close()


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
    interruption = interruption_in(cfg, codes)
    if interruption is None and codes and interrupted.number in handled_signals(cfg):
        error = failure()
        if error.is_cause:
            raise error
    raise interruption or interrupted


def forward_signal(ranks: Supervisor, cfg: DictConfig, verb: str, interrupted: Interrupted) -> list[RankExit]:
    """Forward a signal to the ranks and wait for their exit; a second signal kills them at once."""
    try:
        return ranks.end(ranks.living, exit_timeout(cfg, verb, interrupted.number), interrupted.number)
    except Interrupted:
        return ranks.end(ranks.living, grace=0.0)
