"""Validation of the options of :class:`~trainwright.callbacks.end.preemption.Preemption`.

Imports neither torch nor Lightning: the launching process validates too, before it starts anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from trainwright.core.config.option_rules import Rule, broken_rules, is_count, is_positive, or_none

# A token of RFC 9110.
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")


def _is_address(value: str) -> bool:
    if not value.isascii() or not value.isprintable() or " " in value:
        return False
    try:
        parts = urlsplit(value)
        port, host = parts.port, (parts.hostname or "").encode("idna")
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and host != b"" and port != 0 and parts.username is None


def _is_header(name: Any, value: Any) -> bool:
    are_texts = isinstance(name, str) and isinstance(value, str)
    return are_texts and _HEADER.fullmatch(name) is not None and value.isascii() and value.isprintable()


_IS_SWITCH: Rule = (lambda value: isinstance(value, bool), "True, or False for off")
_RULES: dict[str, Rule] = {
    "save": _IS_SWITCH,
    "requeue": _IS_SWITCH,
    "signals": (
        lambda value: isinstance(value, list | tuple) and all(name in SIGNALS for name in value),
        f"a list of some of {', '.join(SIGNALS)}; [] for none",
    ),
    "file": (lambda value: value is None or bool(str(value).strip()), "a path, or None for off"),
    "url": (
        lambda value: value is None or _is_address(str(value)),
        "an address http://... or https://... in ASCII, without a user; None for off",
    ),
    "url_headers": (lambda value: value is None or isinstance(value, Mapping), "texts by name, {} for none"),
    "poll_seconds": (is_positive, "more than 0 seconds"),
    "deadline_seconds": (or_none(is_positive), "more than 0 seconds, or None for off"),
    "exit_code": (or_none(lambda value: is_count(value, 0) and value <= 255), "0 to 255, or None for 128 + the signal"),
    "check_seconds": (is_positive, "more than 0 seconds"),
}


def preemption_problems(given: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the arguments of ``Preemption``, one message each.

    Args:
        given: all of them by name.
    """
    problems = broken_rules(_RULES, given)
    headers = given["url_headers"] if isinstance(given["url_headers"], Mapping) else {}
    problems += [
        # Without the value, which may be a secret.
        f"url_headers.{name} is no header (allowed: a name without spaces, and a text of one line in ASCII)"
        for name, value in headers.items()
        if not _is_header(name, value)
    ]
    if given["url_headers"] and given["url"] is None:
        problems.append("url_headers without url (give the url that they are for)")
    if given["requeue"] and not given["save"]:
        problems.append("requeue=True with save=False (the job would start from scratch; set save=True)")
    return problems
