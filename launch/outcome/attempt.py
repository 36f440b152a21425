"""One attempt of a run, whoever starts its ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError
from trainwright.core.failures.records import AttemptStart, read_attempt_start
from trainwright.launch.outcome.outcome import Outcome, setback_in
from trainwright.launch.recovery.restarts import Setback
from trainwright.launch.watchdog.monitor import HangMonitor


@dataclass(eq=False)
class RankAttempt(ABC):
    """The ranks of a run from their start to the end of the last.

    Attributes:
        cfg: the resolved configuration of this attempt.
        verb: fit, validate, test or predict.
        records: an empty folder for what the ranks write down.
        monitor: finds ranks that hang; None = off.
    """

    cfg: DictConfig
    verb: str
    records: Path
    monitor: HangMonitor | None

    @abstractmethod
    def run(self, grace_after_failure: float, enough: Callable[[], bool] | None) -> Outcome:
        """Start the ranks and wait for the end of all.

        Args:
            grace_after_failure: seconds that the others have to end when one has failed.
            enough: whether the ranks shall be ended, to go on with other ones; asked every second. None = never.

        Returns:
            How they ended: a failure, metrics, or neither where they were ended to go on with other ones.

        Raises:
            Interrupted: if the ranks were told to end.
        """

    @property
    def beginning(self) -> AttemptStart | None:
        """How it began to train; None as long as it has not."""
        return read_attempt_start(self.records)

    def setback(self, failure: RankError) -> Setback:
        """What the policy must know of a failure of this attempt."""
        return setback_in(self.records, failure)

    def explain(self, failure: RankError) -> RankError:
        """The failure, with what the monitor knows beside it."""
        text = None if self.monitor is None or failure.hang is not None else self.monitor.explain()
        return failure if text is None else failure.because(text)

    def close(self) -> None:
        """Give back what it holds once it has ended."""
        if self.monitor is not None:
            self.monitor.close()
