"""Who is writing: tokens that name a process, so that what a killed one left can be told from what a living one writes.

The token is part of the name of everything that is not finished. A file beside it would come into being after it, and a
process killed in between would leave something that belongs to nobody.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from pathlib import Path

import xxhash

from trainwright.core.processes.process import START_TIME, stat_of

TOKEN = r"[0-9a-f]{8}-[0-9a-f]+-[0-9a-f]+-[0-9a-f]{16}"  # noqa: S105
"""Pattern of a token: random digits, process id, its start time, the place where that id counts."""

ABANDONED_SECONDS = 600.0
"""After so long without a change, what a process of another machine was writing counts as left behind. Its blocks are
written within seconds of each other, and a save whose slowest rank is silent for longer than this is not alive."""


def new_token() -> str:
    """A token of this process."""
    pid = os.getpid()
    return f"{secrets.token_hex(4)}-{pid:x}-{_started(pid) or 0:x}-{_place()}"


def is_token(token: str) -> bool:
    """Whether this is a text that :func:`new_token` could have given."""
    return re.fullmatch(TOKEN, token) is not None


def owner_lives(token: str) -> bool | None:
    """Whether the process that made a token is alive; ``None``: it ran where this process cannot look."""
    _, pid, started, place = token.split("-")
    if place != _place():
        return None
    try:
        os.kill(int(pid, 16), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it is somebody else's, so it exists
    now = _started(int(pid, 16))
    # 0: its start time is not known, on systems without /proc or when it is hidden. Then the id alone decides.
    return now is None or int(started, 16) == 0 or now == int(started, 16)


def left_behind(token: str, idle_seconds: float) -> bool:
    """Whether what carries this token belongs to no living process.

    Args:
        token: of its writer.
        idle_seconds: since anything of it changed, by the clock of its store.
    """
    lives = owner_lives(token)
    return idle_seconds > ABANDONED_SECONDS if lives is None else not lives


def _started(pid: int) -> int | None:
    """Start time of a process in ticks since the machine started; ``None``: not known; -1: it has ended, and only its
    parent has not noticed."""
    fields = stat_of(pid)
    if not fields:
        return None
    return -1 if fields[0] in "ZX" else int(fields[START_TIME])


def _place() -> str:
    """Where a process id names one process: this machine since it started, in this namespace of processes."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # no Linux: host names are all there is
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return xxhash.xxh3_64_hexdigest("\n".join(parts).encode())
