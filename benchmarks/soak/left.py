"""Processes and shared-memory segments left behind by commands (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainwright.core.processes.process import PARENT, stat_of

_SET_CHILD_SUBREAPER = 36
_SHARED = Path("/dev/shm")


def adopt_orphans() -> None:
    """Become the parent of all processes below this one that lose their own, so that :class:`Family` sees them."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Family:
    """The processes that this one has started, and what they have started."""

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        """Exit status of those of which this process is the parent, by process id, as ``os.waitpid`` gives it."""

    def wait(self, process: int, seconds: float) -> int | None:
        """Exit code of a process, negative for a signal; ``None``: it still runs after so many seconds."""
        end = time.monotonic() + seconds
        while process not in self.statuses and time.monotonic() < end:
            self._reap()
            time.sleep(0.01)
        status = self.statuses.pop(process, None)
        return None if status is None else os.waitstatus_to_exitcode(status)

    def left(self, seconds: float) -> dict[int, str]:
        """Those that do not end by themselves within so many seconds: process id -> command line."""
        end = time.monotonic() + seconds
        while (found := self.living()) and time.monotonic() < end:
            time.sleep(0.01)
        return found

    def end(self) -> None:
        """Kill all that live."""
        while found := self.living():
            for process in found:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)

    def living(self) -> dict[int, str]:
        """Process id -> command line."""
        self._reap()
        parents = dict(_parents())
        found = [os.getpid()]
        for each in found:
            found += [child for child, parent in parents.items() if parent == each]
        return {process: _words(process) for process in found[1:]}

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self.statuses[ended[0]] = ended[1]


def _parents() -> Iterator[tuple[int, int]]:
    """Each living process and its parent."""
    for process in filter(str.isdecimal, os.listdir("/proc")):
        fields = stat_of(int(process))  # none if it has just ended
        if fields and fields[0] not in "ZX":
            yield int(process), int(fields[PARENT])


def _words(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def segments() -> set[str]:
    """Names of the shared-memory segments and semaphores of this machine."""
    try:
        return {entry.name for entry in os.scandir(_SHARED) if entry.is_file(follow_symlinks=False)}
    except FileNotFoundError:
        return set()


def abandoned(names: set[str]) -> set[str]:
    """Those segments that no process uses; others of this machine make some as well."""
    if not names & segments():
        return set()
    used: set[str] = set()
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # another user's, or one that has just ended
            maps = Path(f"/proc/{process}/maps").read_text().splitlines()
            used.update(line.rpartition("/")[2] for line in maps if str(_SHARED) in line)
            used.update(os.path.basename(os.readlink(file)) for file in Path(f"/proc/{process}/fd").iterdir())
    return (names & segments()) - used
