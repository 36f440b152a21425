"""An error that ends ranks which no process of ours waits for: one of them prints it, all keep it in their logs.

The ranks of a script share the terminal, whether Lightning's way of starting them, torchrun or SLURM did, and Python
would print the traceback of each. Here the first rank whose error is its own prints one paragraph; one that only lost
its connection to another rank waits for that, and speaks when nobody else does.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from trainwright.core.failures.failure import Failure, log_file, write_traceback
from trainwright.core.run.launcher import detect_launcher

STARTED = "TRAINWRIGHT_STARTED"
"""Variable of ranks that a script has started: `per machine/of all@file`, the file being there once one has spoken."""
# A rank that failed tears down before it speaks; so long wait for it those that have lost their connection to it.
_SECONDS_FOR_CAUSE = 10.0


class Uncaught:
    """Tells of an error that ends this rank, unless another rank of this machine does.

    Args:
        run_dir: below which `logs/` gets the tracebacks; all ranks of this machine give the same.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._began = time.time()

    def tell(self, error: BaseException, silent_end: Callable[[], str | None] = lambda: None) -> None:
        """Keep the traceback of `error` in the log of this rank, and print what a person is to know of it, once.

        Args:
            error: that nobody has caught.
            silent_end: what is known of another rank that ended without a word, as one that was killed; None: nothing.
        """
        rank, world_size = rank_and_world_size()
        failure, log = Failure.of(error, rank), log_file(self._run_dir, rank)
        with contextlib.suppress(OSError):  # a full disk must not hide the error
            write_traceback(error, log)
        if world_size == 1:
            _print(failure.paragraph("the run", "", log))
            return
        text = failure.paragraph(f"rank {rank} of {world_size}", "; the others were ended", log)
        self.say((self._cause(silent_end) or text) if failure.is_secondary else text)

    def say(self, text: str) -> None:
        """Print `text`, unless a rank of this machine has spoken."""
        if self._is_first():
            _print(text)

    def _cause(self, silent_end: Callable[[], str | None]) -> str | None:
        """Wait for another rank to speak, or to have ended in silence; how it did."""
        end, silent = time.monotonic() + _SECONDS_FOR_CAUSE, None
        while silent is None and time.monotonic() < end and not self._mark.exists():
            time.sleep(0.05)
            silent = silent_end()
        return silent

    @property
    def _mark(self) -> Path:
        """A file that is there once a rank of this machine has spoken."""
        if STARTED in os.environ:
            return Path(os.environ[STARTED].partition("@")[2])
        # An agent of torchrun or SLURM is the parent of all ranks of its machine.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", os.environ.get("SLURM_RESTART_COUNT", "0"))
        return self._run_dir / "logs" / f".error_told_{os.getppid()}_{attempt}"

    def _is_first(self) -> bool:
        mark = self._mark
        with contextlib.suppress(FileNotFoundError):
            if STARTED not in os.environ and mark.stat().st_mtime < self._began - _SECONDS_FOR_CAUSE:
                mark.unlink()  # of another job, whose agent had the same process id
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True  # rather twice than never
        return True


def _print(text: str) -> None:
    print(f"trainwright: {text}", file=sys.__stderr__, flush=True)


def is_one_of_many() -> bool:
    """Return whether this process is one rank of several that a launcher or a script has started."""
    return rank_and_world_size()[1] > 1


def rank_and_world_size() -> tuple[int, int]:
    """Return the global rank of this process and the number of ranks, as the environment says; (0, 1): it is alone."""
    if STARTED in os.environ:
        per_machine, world_size = (int(size) for size in os.environ[STARTED].partition("@")[0].split("/"))
        return int(os.environ["NODE_RANK"]) * per_machine + int(os.environ["LOCAL_RANK"]), world_size
    launcher = detect_launcher()
    return (0, 1) if launcher is None else (launcher.rank, launcher.world_size)


def tell_uncaught(
    run_dir: Path, silent_end: Callable[[], str | None] = lambda: None, at_end: Callable[[], None] = lambda: None
) -> None:
    """Have the errors that nobody catches told by one rank alone, from now on; exchanges `sys.excepthook`.

    Args:
        run_dir: below which `logs/` gets the tracebacks.
        silent_end: see :meth:`Uncaught.tell`.
        at_end: called when the error has been told.
    """
    uncaught, before = Uncaught(run_dir), getattr(sys.excepthook, "of_python", sys.excepthook)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, Exception):  # Ctrl-C
            before(kind, error, trace)
        else:
            uncaught.tell(error.with_traceback(trace), silent_end)
        at_end()

    hook.of_python = before  # type: ignore[attr-defined]
    sys.excepthook = hook
