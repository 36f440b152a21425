"""Conversion of untrusted values of records to plain numbers and texts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from trainwright.core.text.printable import shortened

GREATEST = 1e100
"""Largest accepted number: sums and ratios of smaller ones stay finite."""
_LEAST = 1e-100
# Seconds since 1970 that every calendar can represent.
_LATEST = 2.0**33


def number_of(value: object) -> float | None:
    """Return a number of at most :data:`GREATEST` in magnitude from a number or its text, else ``None``."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if not abs(number) <= GREATEST:
        return None
    return number if abs(number) >= _LEAST else 0.0


def is_beyond(value: str) -> bool:
    """Return whether a text is a number that :func:`number_of` rejects as too large or not finite."""
    try:
        return not abs(float(value)) <= GREATEST
    except ValueError:
        return False


def whole_of(value: object) -> int | None:
    """Return an integer from a number or its text, else ``None``."""
    number = number_of(value)
    return None if number is None else int(number)


def text_of(value: object, default: str = "") -> str:
    """Return a text of at most 500 characters; the type's name for other values, ``default`` for None."""
    if value is None:
        return default
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) > GREATEST:
        return "(a huge number)"
    if not isinstance(value, (str, int, float)):
        return f"({type(value).__name__})" if value else ""
    return shortened(str(value))


def time_of(record: Mapping[str, Any]) -> float:
    """Return the time of a record in seconds since 1970; 0 if it has none."""
    return moment_of(record.get("time")) or 0.0


def moment_of(value: object) -> float | None:
    """Return seconds since 1970 from a number or an ISO 8601 date, else ``None``."""
    seconds = number_of(value)
    if seconds is None and isinstance(value, str):
        try:
            seconds = datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError, OSError):
            return None
    return seconds if seconds is not None and 0 <= seconds < _LATEST else None


def steps_of(record: Mapping[str, Any]) -> float:
    """Return the optimizer steps in the window of a record; 1 if it has none."""
    steps = number_of(record.get("steps"))
    return steps if steps is not None and steps > 0 else 1.0
