"""What is impossible about the options of the loss guard, found before training begins, all at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

POLICIES = ("skip", "rollback", "stop")
ON_REPRODUCIBLE = ("skip_window", "stop")


def _is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "policy": (lambda value: value in POLICIES, ", ".join(POLICIES)),
    "on_reproducible": (lambda value: value in ON_REPRODUCIBLE, ", ".join(ON_REPRODUCIBLE)),
    "threshold": (lambda value: value is None or (_is_number(value) and value > 0), "more than 0, or None for off"),
    "min_jump": (_is_number, "0 or more, a part of the loss"),
    "window": (_is_count, "1 or more optimizer steps"),
    "min_history": (lambda value: _is_count(value, 2), "2 or more optimizer steps"),
    "snapshot_every_n_steps": (
        lambda value: value is None or _is_count(value),
        "1 or more optimizer steps, or None for as often as loses least time",
    ),
    "mtbf": (lambda value: _is_number(value) and value > 0, "more than 0 hours"),
    "keep_snapshots": (_is_count, "1 or more"),
    "back_steps": (lambda value: _is_count(value, 0), "0 or more optimizer steps"),
    "skip_steps": (_is_count, "1 or more optimizer steps"),
    "max_rollbacks": (_is_count, "1 or more"),
    "max_skips": (_is_count, "1 or more"),
    "per_steps": (_is_count, "1 or more optimizer steps"),
}


def guard_problems(given: Mapping[str, Any]) -> list[str]:
    """What is wrong with arguments of ``LossGuard``, one text each.

    Args:
        given: some of them by name, or all; unknown names are not looked at.
    """
    problems = [
        f"{name}={given[name]!r} (allowed: {allowed})"
        for name, (holds, allowed) in _RULES.items()
        if name in given and not holds(given[name])
    ]
    if problems:
        return problems  # what the values mean together can be judged only once each is possible
    window, least = given.get("window"), given.get("min_history")
    if window is not None and least is not None and least > window:
        problems.append(
            f"min_history={least} with window={window}: so many steps are never remembered (allowed: min_history of at "
            "most window)"
        )
    return problems
