"""One thing that was looked at, and how bad it is."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, ERROR = "ok", "warning", "error"
STATES = (OK, WARNING, ERROR)


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Args:
        area: machine, devices, libraries, network, clocks or folders.
        check: its name, the same on every machine.
        state: :data:`OK`; :data:`WARNING`: runs may be slow or end badly; :data:`ERROR`: runs will fail.
        found: what is there.
        wanted: what should be there; empty where all is well.
        todo: what to type, or to do; empty where all is well.
        where: the hosts or ranks it is true of; empty: all.
    """

    area: str
    check: str
    state: str
    found: str
    wanted: str = ""
    todo: str = ""
    where: str = ""


def ok(area: str, check: str, found: str) -> Finding:
    """Nothing is wrong."""
    return Finding(area, check, OK, found)


def warning(area: str, check: str, found: str, wanted: str, todo: str) -> Finding:
    """A run may be slow, or end badly."""
    return Finding(area, check, WARNING, found, wanted, todo)


def error(area: str, check: str, found: str, wanted: str, todo: str) -> Finding:
    """A run will fail."""
    return Finding(area, check, ERROR, found, wanted, todo)


def rate(bytes_per_second: float) -> str:
    """Bytes per second for people."""
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.2f} GB/s"
    return f"{bytes_per_second / 1e6:.1f} MB/s"


def time_of(seconds: float) -> str:
    """Seconds for people."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
