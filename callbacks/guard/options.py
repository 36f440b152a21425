"""Validation of the options of the loss guard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.option_rules import Rule, broken_rules, is_count, is_number, is_positive, or_none
from trainwright.core.config.options import class_of

POLICIES = ("skip", "rollback", "stop")
ON_REPRODUCIBLE = ("skip_window", "stop")


_RULES: dict[str, Rule] = {
    "policy": (lambda value: value in POLICIES, ", ".join(POLICIES)),
    "on_reproducible": (lambda value: value in ON_REPRODUCIBLE, ", ".join(ON_REPRODUCIBLE)),
    "threshold": (or_none(is_positive), "more than 0, or None for off"),
    "min_jump": (is_number, "0 or more, a part of the loss"),
    "window": (is_count, "1 or more optimizer steps"),
    "min_history": (lambda value: is_count(value, 2), "2 or more optimizer steps"),
    "snapshot_every_n_steps": (or_none(is_count), "1 or more optimizer steps, or None to lose the least time"),
    "mtbf": (is_positive, "more than 0 hours"),
    "keep_snapshots": (is_count, "1 or more"),
    "back_steps": (lambda value: is_count(value, 0), "0 or more optimizer steps"),
    "skip_steps": (is_count, "1 or more optimizer steps"),
    "max_rollbacks": (is_count, "1 or more"),
    "max_skips": (is_count, "1 or more"),
    "per_steps": (is_count, "1 or more optimizer steps"),
}


def guard_problems(given: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with arguments of ``LossGuard``, one message each.

    Args:
        given: some or all of them by name; unknown names are ignored.
    """
    rules = {name: rule for name, rule in _RULES.items() if name in given}
    problems = broken_rules(rules, given)
    if problems:
        return problems  # combinations can be judged only if each value is valid
    window, least = given.get("window"), given.get("min_history")
    if window is not None and least is not None and least > window:
        problems.append(
            f"min_history={least} with window={window}: the window never holds as many steps (allowed: at most window)"
        )
    return problems


_GUARD = "LossGuard"


def guard_refusals(cfg: DictConfig) -> list[str]:
    """Return what is wrong with the loss guards of a resolved configuration, in `guard` or among the callbacks."""
    guards = {
        f"{group}.{name}": value
        for group in ("guard", "callbacks")
        for name, value in cfg[group].items()
        if class_of(value) == _GUARD
    }
    problems = [
        f"{key}: {problem}"
        for key, value in guards.items()
        for problem in guard_problems(OmegaConf.to_container(value))  # type: ignore[arg-type]
    ]
    if len(guards) > 1:
        problems.append(f"{' and '.join(guards)} are both a {_GUARD}; type guard=none, or remove the other one")
    for key, value in guards.items():
        problems += _conflicts(cfg, key, value.get("policy", "rollback"))
    return problems


def _conflicts(cfg: DictConfig, key: str, policy: str) -> Iterator[str]:
    """Yield options that a guard does not support."""
    if class_of(cfg.optimizer) == "LBFGS":
        yield f"{key} with optimizer LBFGS, which computes the loss several times within a step; type guard=none"
    averaging = [name for name, each in cfg.callbacks.items() if class_of(each) == "StochasticWeightAveraging"]
    if policy == "rollback" and averaging:
        yield (
            f"{key} with callbacks.{averaging[0]}: StochasticWeightAveraging replaces schedulers while it runs, which "
            "a rollback cannot undo; type guard=skip, or use WeightAveraging instead"
        )
