"""What is impossible about the options of the loss guard, found before training begins, all at once."""

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


_GUARD = "LossGuard"


def guard_refusals(cfg: DictConfig) -> list[str]:
    """What speaks against the loss guards of a resolved configuration, in `guard` or among the callbacks."""
    guards = {
        f"{group}.{name}": value
        for group in ("guard", "callbacks")
        for name, value in cfg[group].items()
        if class_of(value) == _GUARD
    }
    problems = [f"{key}: {problem}" for key, value in guards.items() for problem in guard_problems(_options_of(value))]
    if len(guards) > 1:
        problems.append(f"{' and '.join(guards)} are both a {_GUARD}; type guard=none, or leave the other one out")
    for key, value in guards.items():
        problems += _beside(cfg, key, value.get("policy", "rollback"))
    return problems


def _beside(cfg: DictConfig, key: str, policy: str) -> Iterator[str]:
    """What else cannot be had together with a guard."""
    if class_of(cfg.optimizer) == "LBFGS":
        yield f"{key} with optimizer LBFGS, which computes the loss several times within a step; type guard=none"
    averaging = [name for name, each in cfg.callbacks.items() if class_of(each) == "StochasticWeightAveraging"]
    if policy == "rollback" and averaging:
        yield (
            f"{key} with callbacks.{averaging[0]}: StochasticWeightAveraging exchanges schedulers while it runs, which "
            "going back cannot undo; type guard=skip, or use WeightAveraging in its place"
        )


def _options_of(value: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(value)
    return dict(plain)
