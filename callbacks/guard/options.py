"""Validation of the options of the loss guard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal

from omegaconf import DictConfig

from trainwright.core.config.options import class_of, number, value_problems

_GUARD = "LossGuard"


@dataclass(eq=False, repr=False)
class GuardOptions:
    """Options of :class:`~trainwright.callbacks.guard.loss_guard.LossGuard`, which explains them."""

    policy: Literal["skip", "rollback", "stop"] = "rollback"
    _: KW_ONLY
    on_reproducible: Literal["skip_window", "stop"] = "skip_window"
    threshold: float | None = number(6.0, above=0, null="for off")
    min_jump: float = number(0.1, unit="a part of the loss")
    window: int = number(128, least=1, unit="optimizer steps")
    min_history: int = number(32, least=2, unit="optimizer steps")
    snapshot_every_n_steps: int | None = number(None, least=1, unit="optimizer steps", null="to lose the least time")
    mtbf: float = number(3.0, above=0, unit="hours")
    keep_snapshots: int = number(2, least=1)
    back_steps: int = number(0, unit="optimizer steps")
    skip_steps: int = number(10, least=1, unit="optimizer steps")
    max_rollbacks: int = number(4, least=1)
    max_skips: int = number(10, least=1)
    per_steps: int = number(1000, least=1, unit="optimizer steps")

    def option_problems(self, prefix: str = "") -> list[str]:
        """Return what is wrong with the options, one message each; ``prefix`` precedes names on the command line."""
        problems = list(value_problems(GuardOptions, vars(self), prefix))
        if not problems and self.min_history > self.window:
            return [
                f"{prefix}min_history={self.min_history} with window={self.window}: the window never holds as many "
                "steps (allowed: at most window)"
            ]
        return problems


def guard_refusals(cfg: DictConfig) -> list[str]:
    """Return what is wrong with the loss guards of a resolved configuration, in `guard` or among the callbacks."""
    guards = {
        f"{group}.{name}": value
        for group in ("guard", "callbacks")
        for name, value in cfg[group].items()
        if class_of(value) == _GUARD
    }
    names, problems = {item.name for item in fields(GuardOptions)}, []
    for key, value in guards.items():
        given: Any = {name: each for name, each in value.items() if name in names}
        problems += GuardOptions(**given).option_problems(f"{key}.")
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
