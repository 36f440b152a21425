"""Policy of restarts: a failed attempt is restarted after a wait, or given up with a reason."""

import re
import sys
import textwrap
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from trainwright.core.failures.failure import RankError
from trainwright.core.problems import DivergedError

LOG_FILE = "restarts.log"


class RestartLog:
    """Log of failures and restarts.

    Args:
        run_dir: of the run; the file is `logs/restarts.log`, created with the first entry.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "logs" / LOG_FILE
        """The file."""

    def write(self, line: str, details: str = "") -> None:
        """Print one line, and append it to the file with its details.

        Args:
            line: for the terminal (standard error) and the file.
            details: for the file only.
        """
        print(f"trainwright: {line}", file=sys.stderr, flush=True)
        text = f"{datetime.now().isoformat(' ', 'milliseconds')} {line}\n"
        if details:
            text += textwrap.indent(details.rstrip(), "    ") + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:  # a full disk must neither end the run nor hide the reason of the failure
            print(f"trainwright: {self.path} cannot be written ({error}); the entry was:\n{text}", file=sys.stderr)


# Longest wait before a restart, in seconds.
_LONGEST_WAIT = 60.0
# Parts of an error message that differ between occurrences: numbers, addresses, temporary paths.
_INCIDENTAL = re.compile(r"0x[0-9a-f]+|\d+|/tmp/\S+", re.IGNORECASE)


@dataclass(frozen=True)
class AttemptFailure:
    """The failure that ended an attempt.

    Attributes:
        rank: that failed first.
        kind: class of the exception, or how the process ended: a signal (SIGKILL), exit code 7, hang.
        message: of the exception or the hang; empty for a process that ended without one.
        step: optimizer steps done by then; None = it failed before training.
        start_step: optimizer steps done when the attempt started training; None = it did not.
        raised: whether the code ended the process itself, by an exception or an exit code.
    """

    rank: int
    kind: str
    message: str = ""
    step: int | None = None
    start_step: int | None = None
    raised: bool = False

    @property
    def trained(self) -> bool:
        """Whether the attempt made at least one optimizer step."""
        return self.step is not None and self.start_step is not None and self.step > self.start_step

    @property
    def when(self) -> str:
        """The time of the failure in words."""
        return "before training" if self.step is None else f"at step {self.step}"

    def is_same_as(self, other: "AttemptFailure") -> bool:
        """Return whether both are probably the same fault: the same error at the same step.

        An exception may be raised on all ranks, so its rank is ignored; a killed process is identified by its rank.
        """
        return self.step == other.step and self._fault == other._fault

    @property
    def _fault(self) -> tuple[str, str, int | None]:
        return self.kind, _INCIDENTAL.sub("#", self.message), None if self.raised else self.rank


@dataclass(frozen=True)
class Restart:
    """Decision to restart.

    Attributes:
        number: of the restart, from 1.
        seconds: to wait before it.
    """

    number: int
    seconds: float

    @property
    def wait(self) -> str:
        """The wait in words; empty if there is none."""
        return f" in {self.seconds:g} s" if self.seconds else ""


def attempt_failure(failure: RankError, step: int | None, start_step: int | None) -> AttemptFailure:
    """Return the failure of a rank in the terms of the policy.

    Args:
        failure: of a rank.
        step: optimizer steps done by then; None = it failed before training.
        start_step: optimizer steps done when training started; None = it did not.
    """
    raised = failure.failure
    return AttemptFailure(
        rank=failure.rank,
        kind=failure.kind,
        message=raised.message if raised else failure.hang.reason if failure.hang else "",
        step=step,
        start_step=start_step,
        raised=raised is not None or (failure.exit_code or -1) > 0,
    )


class RestartPolicy:
    """Policy of restarts; it knows nothing of processes and reads no clock.

    Progress is a step that no earlier attempt reached. After progress there is no wait; without it, waits double from
    `backoff_seconds` up to a minute.

    Args:
        max_restarts: restarts of a run; None = no limit, 0 = off.
        same_failure_limit: occurrences in a row of the same error at the same step that end the run as a crash loop.
        backoff_seconds: seconds before a second restart without progress; 0 = no wait.
    """

    def __init__(self, max_restarts: int | None = 0, same_failure_limit: int = 3, backoff_seconds: float = 1.0) -> None:
        self._max_restarts = max_restarts
        self._same_failure_limit = same_failure_limit
        self._backoff_seconds = backoff_seconds
        self._restarts = 0
        self._farthest = -1
        self._fruitless = 0
        self._same = 0
        self._last: AttemptFailure | None = None

    @property
    def is_off(self) -> bool:
        """Whether nothing is ever restarted."""
        return self._max_restarts == 0

    def decide(self, setback: AttemptFailure) -> Restart | str:
        """Decide about a failure; return the restart, or a sentence that says why the run is given up."""
        self._count(setback)
        reason = self._reason_to_stop(setback)
        if reason is not None:
            return reason
        self._restarts += 1
        return Restart(self._restarts, self._seconds())

    def restart(self, failure: RankError, setback: AttemptFailure, log: RestartLog) -> Restart:
        """Decide about a failure, and log it if the run is given up.

        Raises:
            RankError: the failure, with the reason for giving up.
        """
        decision = self.decide(setback)
        if isinstance(decision, str):
            log.write(f"given up: {decision}", str(failure))
            raise failure.because(f"the run was given up: {decision}")
        return decision

    def forgive(self) -> None:
        """Reset the failure counts after the cause of the last failure was removed from the run."""
        self._same = 0
        self._fruitless = 0
        self._last = None

    def _count(self, setback: AttemptFailure) -> None:
        step = -1 if setback.step is None else setback.step
        progressed = setback.trained and step > self._farthest
        self._farthest = max(self._farthest, step)
        self._fruitless = 0 if progressed else self._fruitless + 1
        repeated = self._last is not None and setback.is_same_as(self._last)
        self._same = self._same + 1 if repeated else 1
        self._last = setback

    def _reason_to_stop(self, setback: AttemptFailure) -> str | None:
        if setback.kind == DivergedError.__name__:
            return "it is not restarted, because the loss guard ended it (guard=rollback would continue)"
        if setback.raised and not setback.trained and self._restarts == 0:
            return "it is not restarted, because it failed before its first step; fix the error first"
        if self._same >= self._same_failure_limit:
            times = "once" if self._same == 1 else f"{self._same} times in a row"
            same = f"crash loop: the same failure ({setback.kind} {setback.when}) occurred {times}"
            return f"{same} (launch.same_failure_limit={self._same_failure_limit})"
        if self._max_restarts is not None and self._restarts >= self._max_restarts:
            return f"it was restarted {self._restarts} time(s) already (launch.max_restarts={self._max_restarts})"
        return None

    def _seconds(self) -> float:
        if self._fruitless == 0:
            return 0.0
        doublings = min(self._fruitless - 1, 30)
        return float(min(self._backoff_seconds * 2**doublings, _LONGEST_WAIT))
