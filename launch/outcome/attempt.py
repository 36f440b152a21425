"""Interface of one attempt of a run, for any launcher."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError
from trainwright.core.failures.records import Beginning, read_beginning
from trainwright.launch.outcome.outcome import Outcome, setback_in
from trainwright.launch.recovery.restarts import Setback
from trainwright.launch.watchdog.monitor import HangMonitor


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
    def run(self, grace_after_failure: float, enough: Callable[[], bool] | None) -> Outcome:
        """Start the ranks and wait for all to exit.

        Args:
            grace_after_failure: seconds that the others have to exit after one has failed.
            enough: returns whether to end the ranks and continue on other devices; called every second. None = never.

        Returns:
            A failure, metrics, or neither where the ranks were ended to continue on other devices.

        Raises:
            Interrupted: if the ranks were interrupted.
        """

    @property
    def beginning(self) -> Beginning | None:
        """The start of training; None before it."""
        return read_beginning(self.records)

    def setback(self, failure: RankError) -> Setback:
        """Return a failure of this attempt in the terms of the policy."""
        return setback_in(self.records, failure)

    def explain(self, failure: RankError) -> RankError:
        """Return the failure, with the monitor's findings added."""
        text = None if self.monitor is None or failure.hang is not None else self.monitor.explain()
        return failure if text is None else failure.because(text)

    def close(self) -> None:
        """Release resources after the end."""
        if self.monitor is not None:
            self.monitor.close()
