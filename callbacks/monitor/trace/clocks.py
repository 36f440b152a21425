"""Clock offsets between machines, measured over a store."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ROUNDS = 8
_PATIENCE = timedelta(seconds=60)


def machine_id() -> str:
    """Return an id that processes share if they read the same clock."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return platform.node()


def clock_offset(
    store: Any,
    prefix: str,
    rank: int,
    others: Sequence[int],
    clock: Callable[[], int] = time.time_ns,
    machine: str | None = None,
) -> tuple[int, int]:
    """Compare this rank's clock with that of rank 0. A collective over the store.

    Ranks on the machine of rank 0 share its clock. The others ask for its time several times; the fastest answer is
    taken as the time at the middle of its round trip (Cristian 1989), with an error of at most half of that.

    Args:
        store: shared by all ranks.
        prefix: of the keys, unused before.
        rank: of this process.
        others: the ranks that ask, without rank 0, which answers them in turn.
        clock: of this process, nanoseconds.
        machine: default :func:`machine_id`.

    Returns:
        Nanoseconds to add to this rank's clock to get that of rank 0, and the maximum error.
    """
    own = machine_id() if machine is None else machine
    store.set(f"{prefix}/machine/{rank}", own)
    if rank == 0:
        for other in others:
            if _read(store, f"{prefix}/machine/{other}") != own:
                _answer(store, f"{prefix}/{other}", clock)
        return 0, 0
    if _read(store, f"{prefix}/machine/0") == own:
        return 0, 0
    return _ask(store, f"{prefix}/{rank}", clock)


def _answer(store: Any, prefix: str, clock: Callable[[], int]) -> None:
    for turn in range(_ROUNDS):
        _read(store, f"{prefix}/ask/{turn}")
        store.set(f"{prefix}/answer/{turn}", str(clock()))


def _ask(store: Any, prefix: str, clock: Callable[[], int]) -> tuple[int, int]:
    found = []
    for turn in range(_ROUNDS):
        before = clock()
        store.set(f"{prefix}/ask/{turn}", "?")
        theirs = int(_read(store, f"{prefix}/answer/{turn}"))
        after = clock()
        found.append((after - before, theirs - (before + after) // 2))
    took, offset = min(found)
    return offset, took // 2


def _read(store: Any, key: str) -> str:
    store.wait([key], _PATIENCE)
    text: str = store.get(key).decode()
    return text
