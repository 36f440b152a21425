"""What is impossible about the options of :class:`~trainwright.callbacks.preemption.Preemption`, all at once.

Neither torch nor Lightning is imported here: the launching process asks too, before it starts anything.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

_Rule = tuple[Callable[[Any], bool], str]

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _is_address(value: str) -> bool:
    try:
        parts = urlsplit(value)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _is_exit_code(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 255


_RULES: dict[str, _Rule] = {
    "signals": (
        lambda value: not isinstance(value, str) and all(name in SIGNALS for name in value),
        f"a list of some of {', '.join(SIGNALS)}; [] for none",
    ),
    "file": (lambda value: value is None or bool(str(value).strip()), "a path, or None for off"),
    "url": (lambda value: value is None or _is_address(str(value)), "an address http://... or https://..., None = off"),
    "poll_seconds": (_is_positive, "more than 0 seconds"),
    "deadline_seconds": (lambda value: value is None or _is_positive(value), "more than 0 seconds, or None for off"),
    "exit_code": (lambda value: value is None or _is_exit_code(value), "0 to 255, or None for 128 + the signal"),
    "check_seconds": (_is_positive, "more than 0 seconds"),
}


def preemption_problems(given: Mapping[str, Any]) -> list[str]:
    """What is wrong with the arguments of ``Preemption``, one text each.

    Args:
        given: all of them by name.
    """
    problems = [
        f"{name}={given[name]!r} (allowed: {allowed})"
        for name, (holds, allowed) in _RULES.items()
        if not holds(given[name])
    ]
    if given["url_headers"] and given["url"] is None:
        problems.append("url_headers without url (give the url that they are for)")
    if given["requeue"] and not given["save"]:
        problems.append("requeue=True with save=False (the job would begin again where it began; set save=True)")
    return problems


def numbers_of(names: Sequence[str]) -> tuple[int, ...]:
    """The numbers of signals."""
    return tuple(int(signal.Signals[name]) for name in names)
