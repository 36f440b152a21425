"""Findings of checks, and numbers as text."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, ERROR = "ok", "warning", "error"
STATES = (OK, WARNING, ERROR)


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        area: machine, devices, libraries, network, clocks or folders.
        check: name of the check, the same on every machine.
        state: :data:`OK`; :data:`WARNING`: runs may be slow or fail; :data:`ERROR`: runs will fail.
        found: observed state.
        wanted: expected state; empty if ok.
        todo: remedy; empty if ok.
        where: hosts or ranks concerned; empty: all.
    """

    area: str
    check: str
    state: str
    found: str
    wanted: str = ""
    todo: str = ""
    where: str = ""


def ok(area: str, check: str, found: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(area, check, OK, found)


def warning(area: str, check: str, found: str, wanted: str, todo: str) -> Finding:
    """Return a finding that may make runs slow or fail."""
    return Finding(area, check, WARNING, found, wanted, todo)


def error(area: str, check: str, found: str, wanted: str, todo: str) -> Finding:
    """Return a finding that makes runs fail."""
    return Finding(area, check, ERROR, found, wanted, todo)


def rate(bytes_per_second: float) -> str:
    """Format bytes per second."""
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.2f} GB/s"
    return f"{bytes_per_second / 1e6:.1f} MB/s"


def time_of(seconds: float) -> str:
    """Format seconds."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
