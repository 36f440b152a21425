"""Which rank failed first, and how: written by the ranks, read by the launching process."""

import json
import logging
import re
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from trainwright.callbacks.diverged import DivergedError
from trainwright.checkpoint.errors import CheckpointError
from trainwright.trainer.launch.records import write_whole
from trainwright.trainer.launch.supervisor import Hang
from trainwright.trainer.problems import ChangedDataError

# Words of an error that a rank raises because another one has gone.
_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused|was)|socket|broken pipe|timed? ?out|gloo|nccl|store|aborted|peer", re.IGNORECASE
)

_EXIT = SystemExit.__name__


@dataclass(frozen=True)
class Failure:
    """One exception of one rank.

    Attributes:
        rank: global rank.
        kind: name of the exception's class.
        message: its text.
        traceback: the whole traceback, as Python prints it.
        time_ns: when it was raised, in nanoseconds since 1970.
        is_told: whether the message says it all, see :func:`is_told`.
    """

    rank: int
    kind: str
    message: str
    traceback: str
    time_ns: int
    is_told: bool = False


def is_told(error: BaseException) -> bool:
    """Whether the message of `error` says what is wrong and what to type, so that a traceback would only hide it."""
    return isinstance(error, (CheckpointError, ChangedDataError, DivergedError))


def is_consequence(error: BaseException) -> bool:
    """Whether `error` reads like what a rank raises because another one has gone."""
    return isinstance(error, Exception) and _CONSEQUENCE.search(str(error)) is not None


def log_traceback(error: BaseException) -> None:
    """Write a traceback that the terminal does not show into the log of this rank."""
    logging.getLogger("trainwright").error("the run ends by this error", exc_info=error)


class FailureRecorder:
    """Writes the first exception of this rank to a file of its own.

    It is called when the exception appears, before anything is torn down: tearing down makes the other ranks fail too,
    and the earliest record tells the cause from the consequences.

    Args:
        folder: where the records of all ranks lie.
        rank: global rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._written = False

    def record(self, error: BaseException) -> None:
        """Write `error` down, unless an earlier one was, or it is an interruption and no failure."""
        if self._written or _is_interruption(error):
            return
        self._written = True
        text = "".join(traceback.format_exception(error))
        said = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else str(error)
        failure = Failure(self._rank, type(error).__name__, said, text, time.time_ns(), is_told(error))
        write_whole(self._folder / f"{self._rank}.json", json.dumps(asdict(failure)))
        if failure.is_told:
            log_traceback(error)


def _is_interruption(error: BaseException) -> bool:
    """Whether `error` says that this rank was told to end: by Ctrl-C, or as a Trainer ends that has saved."""
    if isinstance(error, SystemExit):
        # Lightning answers Ctrl-C with an exit of its own.
        return isinstance(error.__context__, KeyboardInterrupt) or hasattr(error, "told")
    return isinstance(error, KeyboardInterrupt)


class RankError(RuntimeError):
    """A rank failed, and the others were ended.

    Args:
        text: what a person is told.
        rank: global rank.
        exit_code: of its process; negative = minus the number of the signal that ended it; None = not known.
        failure: what the rank raised; None when it ended without a word (killed, crashed, exited).
        hang: what the monitor found; None: it did not have the rank killed.
    """

    def __init__(
        self, text: str, rank: int, exit_code: int | None, failure: Failure | None = None, hang: Hang | None = None
    ) -> None:
        self.rank = rank
        self.exit_code = exit_code
        self.failure = failure
        self.hang = hang
        super().__init__(text)

    @property
    def kind(self) -> str:
        """Name of the exception's class, or how the process ended, in a word or two."""
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
        return f"rank {self.rank} {_how_it_ended(self.exit_code, with_reason=False)}"

    @property
    def is_cause(self) -> bool:
        """Whether something is known of it that is not just the end of another rank."""
        return self.hang is not None or (self.failure is not None and not _CONSEQUENCE.search(self.failure.message))

    @property
    def exit_code_of_user(self) -> int | None:
        """The exit code that the user's code chose on this rank; None if it chose none."""
        chosen = self.failure.kind == _EXIT if self.failure is not None else self.hang is None
        return self.exit_code if chosen and (self.exit_code or 0) > 0 else None

    def because(self, reason: str) -> "RankError":
        """The same, with why it ends the run."""
        return RankError(f"{self}\n\n{reason}", self.rank, self.exit_code, self.failure, self.hang)


def first_failure(
    folder: Path, exit_codes: Mapping[int, int | None], run_dir: Path, hangs: Mapping[int, Hang] | None = None
) -> RankError:
    """The error that the others follow from.

    Args:
        folder: where the ranks wrote their records.
        exit_codes: of every rank; None where it is not known, or says nothing because the rank was told to end.
        run_dir: the run directory.
        hangs: why the monitor had ranks killed, by rank; None = it had none.
    """
    world_size = len(exit_codes)
    for rank, hang in (hangs or {}).items():
        text = f"rank {rank} of {world_size} hung and was killed; the others were ended\n\n{hang.report.rstrip()}"
        return RankError(text, rank, exit_codes[rank], hang=hang)
    failures = sorted(
        (Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")),
        key=lambda failure: failure.time_ns,
    )
    # A killed process leaves no record; what the others then say of lost connections is its consequence.
    told = {failure.rank for failure in failures}
    silent = [rank for rank, code in exit_codes.items() if rank not in told and _died_by_itself(code)]
    cause = failures[0] if failures else None
    if silent and (cause is None or _CONSEQUENCE.search(cause.message)):
        return _error(None, silent[0], exit_codes, run_dir)
    rank = cause.rank if cause else next((rank for rank, code in exit_codes.items() if code), 0)
    return _error(cause, rank, exit_codes, run_dir)


def failure_of(
    folder: Path, rank: int, exit_code: int, world_size: int, run_dir: Path, hang: Hang | None = None
) -> RankError:
    """The error of one rank that ended while the others go on.

    Args:
        folder: where the ranks wrote their records.
        rank: global rank.
        exit_code: of its process.
        world_size: number of all ranks.
        run_dir: the run directory.
        hang: why the monitor had it killed; None: it did not.
    """
    codes = dict.fromkeys(range(world_size)) | {rank: exit_code}
    if hang is not None:
        text = f"rank {rank} of {world_size} hung and was killed\n\n{hang.report.rstrip()}"
        return RankError(text, rank, exit_code, hang=hang)
    record = folder / f"{rank}.json"
    failure = Failure(**json.loads(record.read_text(encoding="utf-8"))) if record.is_file() else None
    return _error(failure, rank, codes, run_dir, others="")


def ends(folder: Path, exit_codes: Mapping[int, int | None]) -> list[str]:
    """How each of these ranks ended, in a line each.

    Args:
        folder: where the ranks wrote their records.
        exit_codes: of each rank; None where it is not known.
    """
    failures = {rank: folder / f"{rank}.json" for rank in exit_codes}
    told = {rank: Failure(**json.loads(path.read_text("utf-8"))) for rank, path in failures.items() if path.is_file()}
    return [RankError("", rank, code, told.get(rank)).summary for rank, code in sorted(exit_codes.items())]


def _error(
    failure: Failure | None,
    rank: int,
    exit_codes: Mapping[int, int | None],
    run_dir: Path,
    others: str = "; the others were ended",
) -> RankError:
    log, whom, exit_code = log_file(run_dir, rank), f"rank {rank} of {len(exit_codes)}", exit_codes.get(rank)
    if failure is not None and failure.is_told:
        text = f"{failure.message}\n(said by {whom}; its traceback is in {log})"
        return RankError(text, rank, exit_code, failure)
    if failure is not None:
        how = _how_it_failed(failure, failure.message)
        text = f"{whom} {how}{others}\n\n{failure.traceback.rstrip()}"
    else:
        text = f"{whom} {_how_it_ended(exit_code)}{others}"
    tail = _tail(log)
    if tail:
        text += f"\n\nlast lines of {log}:\n{tail}"
    return RankError(text, rank, exit_code, failure)


def log_file(run_dir: Path, rank: int) -> Path:
    """The log of one rank."""
    return run_dir / "logs" / f"rank_{rank}.log"


def _died_by_itself(exit_code: int | None) -> bool:
    """Whether a process ended badly without having been told to (SIGTERM is what the others are sent)."""
    told = (-signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGKILL)
    return exit_code is not None and exit_code not in (0, 1, *told)


def _how_it_failed(failure: Failure, message: str) -> str:
    return f"called {message}" if failure.kind == _EXIT else f"failed with {failure.kind}: {message}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _kind_of_end(exit_code: int | None) -> str:
    if exit_code is None:
        return "end without a word"
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"


def _how_it_ended(exit_code: int | None, with_reason: bool = True) -> str:
    if exit_code is None:
        return "ended without a word"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
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
