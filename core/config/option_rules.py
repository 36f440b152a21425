"""What options may be, and what is said of those that are something else.

Neither torch nor Lightning is imported here: the launching process asks too, before it starts anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainwright.core.config import options
from trainwright.core.config.options import is_whole

Rule = tuple[Callable[[Any], bool], str]
"""Whether a value is allowed, and what is allowed, in words."""


def is_count(value: Any, least: int = 1) -> bool:
    """Whether it is a whole number of ``least`` or more."""
    return is_whole(value, least)


def is_number(value: Any) -> bool:
    """Whether it is a finite number of 0 or more."""
    return options.is_number(value) and value >= 0


def is_positive(value: Any) -> bool:
    """Whether it is a finite number of more than 0."""
    return is_number(value) and value > 0


def or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """What allows ``None`` besides."""
    return lambda value: value is None or holds(value)


def broken_rules(rules: Mapping[str, Rule], given: Mapping[str, Any]) -> list[str]:
    """What is wrong with options, one text each.

    Args:
        rules: by the name of an option.
        given: all options by name; those without a rule may be anything.
    """
    return [
        f"{name}={given[name]!r} (allowed: {allowed})"
        for name, (holds, allowed) in rules.items()
        if not holds(given[name])
    ]
