"""What the kernel tells of a process: Linux's /proc; elsewhere nothing is known, which is said as ``""``."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

# First letter of the state, as in ps(1).
RUNNING, SLEEPING, IN_KERNEL, STOPPED, TRACED, ZOMBIE = "R", "S", "D", "T", "t", "Z"

PARENT, START_TIME = 1, 19
"""Places in what :func:`stat_of` returns."""


def stat_of(process: int, thread: int | None = None) -> list[str]:
    """Return the fields of ``/proc/<process>/stat`` behind the name, the state first; none if it is gone, or no Linux.

    Args:
        process: its id.
        thread: read those of one of its threads.
    """
    place = f"{process}" if thread is None else f"{process}/task/{thread}"
    try:
        # The name of the program, in parentheses, may hold spaces and parentheses itself.
        return Path(f"/proc/{place}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def state_of(process: int, thread: int | None = None) -> str:
    """State of a process or of one of its threads: ``R``, ``S``, ``D``, ``T``, ``Z``, ...; ``""`` = gone or not known.

    A process that a debugger holds is ``t``, one that a signal has stopped is ``T``.
    """
    return next(iter(stat_of(process, thread)), "")


def stop_of(process: int) -> int | None:
    """Which of its stops a process is in; ``None`` = a signal has not stopped it.

    It is told by how often the main thread has given up the processor, which one that was continued and stopped again
    has done in between.
    """
    status = _status(process)
    if not status.get("State", "").strip().startswith(STOPPED):
        return None
    return sum(int(status.get(f"{kind}_ctxt_switches", "0")) for kind in ("voluntary", "nonvoluntary"))


def name_of(process: int) -> str:
    """Short name of a process, as it or its main thread has set it; ``""`` = gone or not known."""
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


def children_of(process: int) -> list[int]:
    """Living processes that a process has started, in the order of their ids; none of one that has ended."""
    found: set[int] = set()
    with suppress(OSError):  # it ended meanwhile
        for thread in os.listdir(f"/proc/{process}/task"):
            with suppress(OSError):  # the thread did
                children = Path(f"/proc/{process}/task/{thread}/children").read_text()
                found.update(int(child) for child in children.split())
    return sorted(found)


def catches(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal, so that sending it does no harm."""
    return bool(int(_status(process).get("SigCgt", "0"), 16) >> (number - 1) & 1)


def is_alive(process: int, state: str | None = None) -> bool:
    """Whether a process exists and has not ended.

    Args:
        process: its id.
        state: of the process, where it is known already.
    """
    if (state_of(process) if state is None else state) in (ZOMBIE, "X"):
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def kill_with_workers(process: int) -> None:
    """Kill a process and those that it has forked, such as workers of a data loader.

    A worker notices that its parent is gone when it next looks, and one that is stuck never looks. Programs that the
    process has started are no workers, and live on.
    """
    command = _command(process)
    workers = [child for child in children_of(process) if _command(child) == command]
    for each in (process, *workers):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _status(process: int) -> dict[str, str]:
    """What the kernel tells by name; nothing where the process is gone."""
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
