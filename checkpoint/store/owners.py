"""Tokens that identify a writing process, to tell leftovers of killed writers from files being written.

The token is part of the name of everything unpublished. A separate owner file would leave a window in which a killed
process leaves something without an owner.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from pathlib import Path

import xxhash

from trainwright.core.processes.process import START_TIME, is_alive, stat_of

TOKEN = r"[0-9a-f]{8}-[0-9a-f]+-[0-9a-f]+-[0-9a-f]{16}"  # noqa: S105
"""Pattern of a token: random digits, process id, its start time, and hash of the host and pid namespace."""

ABANDONED_SECONDS = 600.0
"""Seconds without a change after which files of another machine's process count as abandoned. A live writer writes
every few seconds."""


def new_token() -> str:
    """Return a token of this process."""
    pid = os.getpid()
    return f"{secrets.token_hex(4)}-{pid:x}-{_started(pid):x}-{_place()}"


def is_token(token: str) -> bool:
    """Return whether ``token`` has the form of :func:`new_token`."""
    return re.fullmatch(TOKEN, token) is not None


def owner_lives(token: str) -> bool | None:
    """Return whether the process of a token is alive; ``None``: it ran on another machine or in another namespace."""
    _, pid, started, place = token.split("-")
    if place != _place():
        return None
    # 0: unknown start time, without /proc or if it is hidden. Then the id alone decides.
    times = {_started(int(pid, 16)), int(started, 16)} - {0}
    return is_alive(int(pid, 16)) and len(times) < 2


def is_abandoned(token: str, idle_seconds: float) -> bool:
    """Return whether files with this token belong to no live process.

    Args:
        token: of their writer.
        idle_seconds: since they last changed, by the clock of their store.
    """
    lives = owner_lives(token)
    return idle_seconds > ABANDONED_SECONDS if lives is None else not lives


def _started(pid: int) -> int:
    """Return a process's start time in ticks since boot; 0: unknown."""
    fields = stat_of(pid)
    return int(fields[START_TIME]) if fields else 0


def _place() -> str:
    """Return a hash of the scope of process ids: this machine since boot, and its pid namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not Linux: host name only
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return xxhash.xxh3_64_hexdigest("\n".join(parts).encode())
