"""What the kernel tells of a process: Linux's /proc; elsewhere nothing is known, which is said as ``""``."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

# First letter of the state, as in ps(1).
RUNNING, SLEEPING, IN_KERNEL, STOPPED, ZOMBIE = "R", "S", "D", "T", "Z"


def state_of(process: int, thread: int | None = None) -> str:
    """State of a process or of one of its threads: ``R``, ``S``, ``D``, ``T``, ``Z``, ...; ``""`` = gone or not known.

    A process that a debugger holds is ``t``, one that a signal has stopped is ``T``.
    """
    folder = Path(f"/proc/{process}") if thread is None else Path(f"/proc/{process}/task/{thread}")
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def name_of(process: int) -> str:
    """Short name of a process, as it or its main thread has set it; ``""`` = gone or not known."""
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


def children_of(process: int) -> list[int]:
    """Living processes that a process has started, in the order of their ids."""
    found: set[int] = set()
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # a thread that ended meanwhile
            found.update(int(child) for child in task.read_text().split())
    return sorted(found)


def catches(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal, so that sending it does no harm."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def is_alive(process: int) -> bool:
    """Whether a process exists and has not ended."""
    if state_of(process) in (ZOMBIE, "X"):
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


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""
