"""Validation rules for option values. Imports neither torch nor Lightning, so the launching process can check too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainwright.core.config import options

Rule = tuple[Callable[[Any], bool], str]
"""A predicate of allowed values, and a description of them."""


is_count = options.is_whole
"""Return whether a value is an integer of at least 1, or of at least the second argument."""


def is_number(value: Any) -> bool:
    """Return whether ``value`` is finite and at least 0."""
    return options.is_number(value) and value >= 0


def is_positive(value: Any) -> bool:
    """Return whether ``value`` is finite and above 0."""
    return is_number(value) and value > 0


def or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a predicate that also allows ``None``."""
    return lambda value: value is None or holds(value)


def broken_rules(rules: Mapping[str, Rule], given: Mapping[str, Any]) -> list[str]:
    """Return one message per invalid option.

    Args:
        rules: by option name.
        given: all options by name; those without a rule are not checked.
    """
    return [
        f"{name}={given[name]!r} (allowed: {allowed})"
        for name, (holds, allowed) in rules.items()
        if not holds(given[name])
    ]
