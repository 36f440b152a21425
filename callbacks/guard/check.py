"""What is impossible about the loss guard, as far as it can be told before a process starts."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.callbacks.guard.options import guard_problems
from trainwright.core.config.options import class_of

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
