"""What is wrong with options, and the values that they take; without torch, for the command line."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def refuse(problems: Iterable[str]) -> None:
    """Raise all problems together; nothing if there are none.

    Raises:
        ValueError: with every problem, as soon as there is one.
    """
    found = list(problems)
    if found:
        raise ValueError("; ".join(found))


def is_whole(value: Any, least: int) -> bool:
    """Whether an option is a whole number of at least ``least``; ``True`` and ``False`` are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """Whether an option is a finite number; ``True`` and ``False`` are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def class_of(node: Any) -> str:
    """Name of the class that a part of a configuration builds; empty where it builds none."""
    return str(node.get("_target_", "")).rsplit(".", 1)[-1] if hasattr(node, "get") else ""
