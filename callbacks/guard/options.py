"""What is impossible about the options of the loss guard, found before training begins, all at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.core.config.option_rules import Rule, broken_rules, is_count, is_number, is_positive, or_none

POLICIES = ("skip", "rollback", "stop")
ON_REPRODUCIBLE = ("skip_window", "stop")


_RULES: dict[str, Rule] = {
    "policy": (lambda value: value in POLICIES, ", ".join(POLICIES)),
    "on_reproducible": (lambda value: value in ON_REPRODUCIBLE, ", ".join(ON_REPRODUCIBLE)),
    "threshold": (or_none(is_positive), "more than 0, or None for off"),
    "min_jump": (is_number, "0 or more, a part of the loss"),
    "window": (is_count, "1 or more optimizer steps"),
    "min_history": (lambda value: is_count(value, 2), "2 or more optimizer steps"),
    "snapshot_every_n_steps": (
        or_none(is_count),
        "1 or more optimizer steps, or None for as often as loses least time",
    ),
    "mtbf": (is_positive, "more than 0 hours"),
    "keep_snapshots": (is_count, "1 or more"),
    "back_steps": (lambda value: is_count(value, 0), "0 or more optimizer steps"),
    "skip_steps": (is_count, "1 or more optimizer steps"),
    "max_rollbacks": (is_count, "1 or more"),
    "max_skips": (is_count, "1 or more"),
    "per_steps": (is_count, "1 or more optimizer steps"),
}


def guard_problems(given: Mapping[str, Any]) -> list[str]:
    """What is wrong with arguments of ``LossGuard``, one text each.

    Args:
        given: some of them by name, or all; unknown names are not looked at.
    """
    rules = {name: rule for name, rule in _RULES.items() if name in given}
    problems = broken_rules(rules, given)
    if problems:
        return problems  # what the values mean together can be judged only once each is possible
    window, least = given.get("window"), given.get("min_history")
    if window is not None and least is not None and least > window:
        problems.append(
            f"min_history={least} with window={window}: so many steps are never remembered (allowed: min_history of at "
            "most window)"
        )
    return problems
