"""Reporting of uncaught errors of ranks started by a script, torchrun or SLURM: one rank prints it, all log it.

These ranks share a terminal, where Python would print the traceback of each. Instead the first rank with an error of
its own prints one paragraph. A rank that only lost its connection to another waits for that, and prints if none does.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

from trainwright.core.failures.failure import Failure, log_file, write_traceback
from trainwright.core.run.launcher import detect_launcher

STARTED = "TRAINWRIGHT_STARTED"
"""Environment variable of ranks started by a script: `per machine/of all@file`; the file exists once one has
reported."""
# How long ranks that lost a connection wait for the failed rank, which tears down before it reports.
_SECONDS_FOR_CAUSE = 10.0


class Uncaught:
    """Reporter of an error that ends this rank, unless another rank of this machine has reported one.

    Args:
        run_dir: its `logs/` gets the tracebacks; the same on all ranks of this machine.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._began = time.time()

    def report(self, error: BaseException, silent_end: Callable[[], str | None] = lambda: None) -> None:
        """Append the traceback of `error` to the log of this rank, and print a paragraph once per machine.

        Args:
            error: uncaught.
            silent_end: returns how another rank ended without an error, as when killed; None: none did.
        """
        rank, world_size = rank_and_world_size()
        failure, log = Failure.of(error, rank), log_file(self._run_dir, rank)
        with contextlib.suppress(OSError):  # report the error even if the disk is full
            write_traceback(error, log)
        if world_size == 1:
            _print(failure.paragraph("the run", "", log))
            return
        text = failure.paragraph(f"rank {rank} of {world_size}", "; the others were ended", log)
        self.print_once((self._cause(silent_end) or text) if failure.is_secondary else text)

    def print_once(self, text: str) -> None:
        """Print `text`, unless another rank of this machine has printed."""
        if self._is_first():
            _print(text)

    def _cause(self, silent_end: Callable[[], str | None]) -> str | None:
        """Wait for another rank to report or to end silently; return how the latter ended."""
        end, silent = time.monotonic() + _SECONDS_FOR_CAUSE, None
        while silent is None and time.monotonic() < end and not self._mark.exists():
            time.sleep(0.05)
            silent = silent_end()
        return silent

    @property
    def _mark(self) -> Path:
        """A file that exists once a rank of this machine has reported."""
        if STARTED in os.environ:
            return Path(os.environ[STARTED].partition("@")[2])
        # The agent of torchrun or SLURM is the parent of all ranks of its machine.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", os.environ.get("SLURM_RESTART_COUNT", "0"))
        return self._run_dir / "logs" / f".error_told_{os.getppid()}_{attempt}"

    def _is_first(self) -> bool:
        mark = self._mark
        with contextlib.suppress(FileNotFoundError):
            if STARTED not in os.environ and mark.stat().st_mtime < self._began - _SECONDS_FOR_CAUSE:
                mark.unlink()  # left by another job whose agent had the same process id
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True  # better twice than never
        return True


def _print(text: str) -> None:
    print(f"trainwright: {text}", file=sys.__stderr__, flush=True)


def is_one_of_many() -> bool:
    """Return whether this process is one of several ranks that a launcher or a script has started."""
    return rank_and_world_size()[1] > 1


def rank_and_world_size() -> tuple[int, int]:
    """Return the global rank and world size from the environment; (0, 1) for a single process."""
    if STARTED in os.environ:
        per_machine, world_size = (int(size) for size in os.environ[STARTED].partition("@")[0].split("/"))
        return int(os.environ["NODE_RANK"]) * per_machine + int(os.environ["LOCAL_RANK"]), world_size
    launcher = detect_launcher()
    return (0, 1) if launcher is None else (launcher.rank, launcher.world_size)


def _end_of_starter(process: int) -> str | None:
    """Return how the rank that started this one from a script, as `process`, has ended; None: it runs."""
    if STARTED not in os.environ or os.getppid() == process:
        return None
    rank, world_size = rank_and_world_size()
    return f"rank {rank - int(os.environ['LOCAL_RANK'])} of {world_size} ended without an error; the others were ended"


def report_uncaught(
    run_dir: Path, silent_end: Callable[[], str | None] | None = None, at_end: Callable[[], None] = lambda: None
) -> None:
    """Install a `sys.excepthook` that reports uncaught errors on one rank only.

    Args:
        run_dir: its `logs/` gets the tracebacks.
        silent_end: see :meth:`Uncaught.report`; None: looks for the end of the rank that started this one.
        at_end: called after reporting.
    """
    silent_end = silent_end or partial(_end_of_starter, os.getppid())
    uncaught, before = Uncaught(run_dir), getattr(sys.excepthook, "of_python", sys.excepthook)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, Exception):  # Ctrl-C
            before(kind, error, trace)
        else:
            uncaught.report(error.with_traceback(trace), silent_end)
        at_end()

    hook.of_python = before  # type: ignore[attr-defined]
    sys.excepthook = hook
