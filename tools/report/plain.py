"""Values of records that others wrote: each is taken for what it should be, or for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from trainwright.core.text.printable import shortened

GREATEST = 1e100
"""Of a number that is taken: sums and ratios of smaller ones stay finite."""
_LEAST = 1e-100
# Seconds since 1970 that every calendar can tell of.
_LATEST = 2.0**33


def number_of(value: object) -> float | None:
    """A number of at most :data:`GREATEST` either way, of a number or its text; None for everything else."""
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
    """Whether a text is a number, but none that :func:`number_of` takes."""
    try:
        return not abs(float(value)) <= GREATEST
    except ValueError:
        return False


def whole_of(value: object) -> int | None:
    """A whole number, of a number or its text; None for everything else."""
    number = number_of(value)
    return None if number is None else int(number)


def text_of(value: object, default: str = "") -> str:
    """A text of at most 500 letters; of what is no text and no number its kind, ``default`` for None."""
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
    """When a record was noted, in seconds since 1970; 0 if it does not say."""
    return moment_of(record.get("time")) or 0.0


def moment_of(value: object) -> float | None:
    """Seconds since 1970 that a calendar can tell of, of these or a date as ISO 8601; None for everything else."""
    seconds = number_of(value)
    if seconds is None and isinstance(value, str):
        try:
            seconds = datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError, OSError):
            return None
    return seconds if seconds is not None and 0 <= seconds < _LATEST else None


def steps_of(record: Mapping[str, Any]) -> float:
    """Optimizer steps of the window that a record is of; 1 if it does not say."""
    steps = number_of(record.get("steps"))
    return steps if steps is not None and steps > 0 else 1.0
