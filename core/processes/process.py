"""Kernel state of processes from Linux's /proc; ``""`` where unknown, as on other systems."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

# States as in ps(1).
RUNNING, SLEEPING, IN_KERNEL, STOPPED, TRACED, ZOMBIE = "R", "S", "D", "T", "t", "Z"

PARENT, START_TIME = 1, 19
"""Indices into the result of :func:`stat_of`."""


def stat_of(process: int, thread: int | None = None) -> list[str]:
    """Return the fields of ``/proc/<process>/stat`` after the name, the state first; empty if unknown.

    Args:
        process: its id.
        thread: id of one of its threads to read instead.
    """
    place = f"{process}" if thread is None else f"{process}/task/{thread}"
    try:
        # The program name, in parentheses, may itself contain spaces and parentheses.
        return Path(f"/proc/{place}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def state_of(process: int, thread: int | None = None) -> str:
    """Return the state of a process or thread: ``R``, ``S``, ``D``, ``T``, ``Z``, ...; ``""`` if gone or unknown.

    A process stopped by a debugger is ``t``, by a signal ``T``.
    """
    return next(iter(stat_of(process, thread)), "")


def stop_id(process: int) -> int | None:
    """Return an id of the present stop of a process; ``None`` if no signal has stopped it.

    The id is the number of context switches, which grows when the process is continued and stopped again.
    """
    status = _status(process)
    if not status.get("State", "").strip().startswith(STOPPED):
        return None
    return sum(int(status.get(f"{kind}_ctxt_switches", "0")) for kind in ("voluntary", "nonvoluntary"))


def name_of(process: int) -> str:
    """Return the short name of a process; ``""`` if gone or unknown."""
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


def children_of(process: int) -> list[int]:
    """Return the ids of a process's live children, sorted; empty if it has ended."""
    found: set[int] = set()
    with suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{process}/task"):
            with suppress(OSError):  # the thread has ended
                children = Path(f"/proc/{process}/task/{thread}/children").read_text()
                found.update(int(child) for child in children.split())
    return sorted(found)


def catches(process: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, so that sending it is harmless."""
    return bool(int(_status(process).get("SigCgt", "0"), 16) >> (number - 1) & 1)


def is_alive(process: int, state: str | None = None) -> bool:
    """Return whether a process exists and has not ended.

    Args:
        process: its id.
        state: of the process, if already known.
    """
    if (state_of(process) if state is None else state) in (ZOMBIE, "X"):
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's process, so it exists
    return True


def kill_with_workers(process: int) -> None:
    """Kill a process and its forked children, such as data loader workers, which may be stuck and miss its end.

    Other programs that it has started are left alone.
    """
    command = _command(process)
    workers = [child for child in children_of(process) if _command(child) == command]
    for each in (process, *workers):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _status(process: int) -> dict[str, str]:
    """Return the kernel's named fields; empty if the process is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value for name, _, value in (line.partition(":") for line in lines)}


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""
