"""Option checks shared by strategies and the command line; without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def refuse(problems: Iterable[str]) -> None:
    """Raise all problems together, if there are any.

    Raises:
        ValueError: with every problem.
    """
    found = list(problems)
    if found:
        raise ValueError("; ".join(found))


def is_whole(value: Any, least: int = 1) -> bool:
    """Return whether ``value`` is an integer (not a bool) of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number (not a bool)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def class_of(node: Any) -> str:
    """Return the name of the class that a configuration node builds; empty if it builds none."""
    return str(node.get("_target_", "")).rsplit(".", 1)[-1] if hasattr(node, "get") else ""
