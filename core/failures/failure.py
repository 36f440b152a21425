"""Records of the first failure of each rank: written by the ranks, read by the launching process."""

import json
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from trainwright.core.failures.error_text import is_refusal, is_secondary, message_of, place, short_traceback
from trainwright.core.failures.records import write_whole

_EXIT = SystemExit.__name__
# Likely reasons for an exit without a failure, by exit code.
_EARLY = {0: " before the others (os._exit?)", 1: " without an error of its own (KeyboardInterrupt?)"}
TRACEBACK_MARK = "traceback| "
"""Prefix of each line of a traceback in a log; terminals leave these lines out."""


class FoundHang(Protocol):
    """A hang found by a monitor."""

    @property
    def rank(self) -> int:
        """The rank that blocks the others."""

    @property
    def reason(self) -> str:
        """One line."""

    @property
    def report(self) -> str:
        """The full report."""


@dataclass(frozen=True)
class Failure:
    """One exception of one rank.

    Attributes:
        rank: global rank.
        kind: name of the exception's class.
        message: its text.
        time_ns: when it was raised, in nanoseconds since 1970.
        place: `file:line` of the innermost frame of the user's code; empty if there is none.
        frames: the user's frames, as Python prints them.
        is_refusal: whether the message suffices and a traceback would only hide it.
        is_secondary: whether it follows from the end of another rank.
    """

    rank: int
    kind: str
    message: str
    time_ns: int
    place: str = ""
    frames: str = ""
    is_refusal: bool = False
    is_secondary: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "Failure":
        """Describe an exception that a rank has just raised."""
        return cls(
            rank,
            kind=type(error).__name__,
            message=message_of(error),
            time_ns=time.time_ns(),
            place=place(error),
            frames=short_traceback(error),
            is_refusal=is_refusal(error),
            is_secondary=is_secondary(error),
        )

    def paragraph(self, whom: str, others: str, log: Path) -> str:
        """Return the message for the terminal.

        Args:
            whom: which rank of how many.
            others: what happened to the other ranks.
            log: file with the full traceback.
        """
        if self.is_refusal:
            where = f" at {self.place}" if self.place else ""
            return f"{self.message}\n(said by {whom}{where}; its traceback is in {log})"
        frames = f"\n{self.frames}" if self.frames else ""
        return f"{whom} {_how_it_failed(self, self.message)}{others}{frames}\n(its traceback is in {log})"


def write_traceback(error: BaseException, log: Path) -> None:
    """Append the full traceback of an error to a rank's log."""
    lines = "".join(traceback.format_exception(error)).rstrip().split("\n")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write("".join(f"{TRACEBACK_MARK}{line}\n" for line in lines))


class FailureRecorder:
    """Recorder of the first exception of this rank, in a file of its own.

    It runs when the exception appears, before any teardown: teardown makes other ranks fail too, and the earliest
    record tells the cause from its consequences.

    Args:
        folder: of the records of all ranks.
        rank: global rank.
        run_dir: run directory whose `logs/` gets the full traceback; None = not known yet.
    """

    def __init__(self, folder: Path, rank: int, run_dir: Path | None = None) -> None:
        self.run_dir = run_dir
        self._folder = folder
        self._rank = rank
        self._written = False

    def record(self, error: BaseException) -> None:
        """Record `error`, unless one is recorded already or it is an interruption."""
        if self._written or _is_interruption(error):
            return
        self._written = True
        write_whole(self._folder / f"{self._rank}.json", json.dumps(asdict(Failure.of(error, self._rank))))
        if self.run_dir is not None:
            write_traceback(error, log_file(self.run_dir, self._rank))


def _is_interruption(error: BaseException) -> bool:
    """Return whether `error` ends this rank on request: by Ctrl-C, or after a Trainer has saved."""
    if isinstance(error, SystemExit):
        # Lightning turns Ctrl-C into a SystemExit.
        return isinstance(error.__context__, KeyboardInterrupt) or hasattr(error, "told")
    return isinstance(error, KeyboardInterrupt)


class RankError(RuntimeError):
    """A failed rank; the other ranks were ended.

    Args:
        text: the message.
        rank: global rank.
        exit_code: of its process; negative = minus the signal that ended it; None = unknown.
        failure: its exception; None if it was killed, crashed or exited.
        hang: found by the monitor that had it killed; None: it did not hang.

    Attributes:
        is_refused: whether the rank refused the configuration before training anything.
    """

    is_refused = False

    def __init__(
        self, text: str, rank: int, exit_code: int | None, failure: Failure | None = None, hang: FoundHang | None = None
    ) -> None:
        self.rank = rank
        self.exit_code = exit_code
        self.failure = failure
        self.hang = hang
        super().__init__(text)

    @property
    def kind(self) -> str:
        """Name of the exception's class, or a short description of how the process ended."""
        if self.hang is not None:
            return "hang"
        if self.failure is not None:
            return self.failure.kind
        return _kind_of_end(self.exit_code)

    @property
    def summary(self) -> str:
        """One line."""
        if self.hang is not None:
            return f"rank {self.rank} hangs: {_first_line(self.hang.reason)}"
        if self.failure is not None:
            return f"rank {self.rank} {_how_it_failed(self.failure, _first_line(self.failure.message))}"
        return f"rank {self.rank} {describe_end(self.exit_code, with_reason=False)}"

    @property
    def is_cause(self) -> bool:
        """True unless it is known only to follow from the end of another rank."""
        return self.hang is not None or (self.failure is not None and not self.failure.is_secondary)

    @property
    def exit_code_of_user(self) -> int | None:
        """Exit code chosen by the user's code on this rank; None if it chose none."""
        chosen = self.failure.kind == _EXIT if self.failure is not None else self.hang is None
        return self.exit_code if chosen and (self.exit_code or 0) > 0 else None

    def because(self, reason: str) -> "RankError":
        """Return a copy that adds why it ends the run."""
        return RankError(f"{self}\n\n{reason}", self.rank, self.exit_code, self.failure, self.hang)


def first_failure(
    folder: Path, exit_codes: Mapping[int, int | None], run_dir: Path, hangs: Mapping[int, FoundHang] | None = None
) -> RankError:
    """Return the error that caused the others.

    Args:
        folder: of the ranks' records.
        exit_codes: of every rank; None where unknown, or where the rank was ended on purpose.
        run_dir: the run directory.
        hangs: of ranks killed by the monitor; None = none.
    """
    for rank, hang in (hangs or {}).items():
        return _error(None, rank, exit_codes, run_dir, hang=hang)
    failures = sorted(
        (Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")),
        key=lambda failure: (failure.is_secondary, failure.time_ns),
    )
    # A killed process leaves no record; lost connections of the others are its consequence.
    recorded = {failure.rank for failure in failures}
    cause = failures[0] if failures else None
    ended = [rank for rank, code in exit_codes.items() if rank not in recorded and code is not None]
    silent = [rank for rank in ended if _died_by_itself(exit_codes[rank])]
    if cause is not None and cause.is_secondary:  # an early exit of another rank is its cause
        silent += sorted(rank for rank in ended if exit_codes[rank] in (0, 1))
    if silent and (cause is None or cause.is_secondary):
        return _error(None, silent[0], exit_codes, run_dir)
    rank = cause.rank if cause else next((rank for rank, code in exit_codes.items() if code), 0)
    return _error(cause, rank, exit_codes, run_dir)


def failure_of(
    folder: Path, rank: int, exit_code: int, world_size: int, run_dir: Path, hang: FoundHang | None = None
) -> RankError:
    """Return the error of one rank that ended while the others continue.

    Args:
        folder: of the ranks' records.
        rank: global rank.
        exit_code: of its process.
        world_size: number of ranks.
        run_dir: the run directory.
        hang: if the monitor had it killed; None: it did not.
    """
    codes = dict.fromkeys(range(world_size)) | {rank: exit_code}
    return _error(_recorded(folder, rank), rank, codes, run_dir, others="", hang=hang)


def end_summaries(folder: Path, exit_codes: Mapping[int, int | None]) -> list[str]:
    """Return one line per rank on how it ended.

    Args:
        folder: of the ranks' records.
        exit_codes: by rank; None where unknown.
    """
    return [RankError("", rank, code, _recorded(folder, rank)).summary for rank, code in sorted(exit_codes.items())]


def _recorded(folder: Path, rank: int) -> Failure | None:
    path = folder / f"{rank}.json"
    return Failure(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _error(
    failure: Failure | None,
    rank: int,
    exit_codes: Mapping[int, int | None],
    run_dir: Path,
    others: str = "; the others were ended",
    hang: FoundHang | None = None,
) -> RankError:
    log, whom, exit_code = log_file(run_dir, rank), f"rank {rank} of {len(exit_codes)}", exit_codes.get(rank)
    if hang is not None:
        text = f"{whom} hung and was killed{others}\n\n{hang.report.rstrip()}"
        return RankError(text, rank, exit_code, hang=hang)
    if failure is not None:
        return RankError(failure.paragraph(whom, others, log), rank, exit_code, failure)
    text = f"{whom} {describe_end(exit_code)}{others}"
    tail = _tail(log)
    if tail:
        text += f"\n\nlast lines of {log}:\n{tail}"
    return RankError(text, rank, exit_code)


def log_file(run_dir: Path, rank: int) -> Path:
    """Return the log of one rank."""
    return run_dir / "logs" / f"rank_{rank}.log"


def _died_by_itself(exit_code: int | None) -> bool:
    """Return whether a process failed on its own (the others are ended by SIGTERM)."""
    on_request = (-signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGKILL)
    return exit_code is not None and exit_code not in (0, 1, *on_request)


def _how_it_failed(failure: Failure, message: str) -> str:
    return f"called {message}" if failure.kind == _EXIT else f"failed with {failure.kind}: {message}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _kind_of_end(exit_code: int | None) -> str:
    if exit_code is None:
        return "unknown end"
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"


def describe_end(exit_code: int | None, with_reason: bool = True) -> str:
    """Return how a process without a failure record ended, such as `was ended by SIGKILL`, with the likely reason."""
    if exit_code is None:
        return "ended for an unknown reason"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}{_EARLY.get(exit_code, '') if with_reason else ''}"
    name = signal.Signals(-exit_code).name
    reason = {
        "SIGKILL": " (from outside, or by the kernel when memory ran out: see `dmesg`)",
        "SIGSEGV": " (a crash in compiled code)",
        "SIGABRT": " (a crash in compiled code)",
        "SIGBUS": " (often: shared memory is full; use fewer data loader workers)",
    }
    return f"was ended by {name}{reason.get(name, '') if with_reason else ''}"


def _tail(path: Path, lines: int = 20) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16384))
        return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])
