"""scheduler: the callback `learning_rate_schedule`, which takes the place of the module's own scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainwright.core.problems import did_you_mean
from trainwright.tools.deepspeed.key import AUTO, MAPPED, UNSUPPORTED
from trainwright.tools.deepspeed.translation import Translation

TYPE = "scheduler.type"
_PARAMS = "scheduler.params"
_NATIVE = "callbacks.learning_rate_schedule"
_SCHEDULES = "trainwright.callbacks.schedule.schedules"


@dataclass(frozen=True)
class _Kind:
    """A scheduler.

    Attributes:
        schedule: class of `trainwright.callbacks.schedule.schedules`.
        arguments: key of the file -> argument, and its default: `...` = it must be given, None = that of the class.
    """

    schedule: str
    arguments: dict[str, tuple[str, Any]] = field(default_factory=dict)


_WARMUP: dict[str, tuple[str, Any]] = {
    "warmup_min_lr": ("lowest", None),
    "warmup_max_lr": ("highest", None),
    "warmup_num_steps": ("warmup_steps", None),
    "warmup_type": ("shape", None),
}
KINDS = {
    "WarmupLR": _Kind("Warmup", _WARMUP),
    "WarmupDecayLR": _Kind(
        "WarmupDecay", {**_WARMUP, "warmup_max_lr": ("highest", 0.001), "total_num_steps": ("total_steps", ...)}
    ),
    "WarmupCosineLR": _Kind(
        "WarmupCosine",
        {
            "total_num_steps": ("total_steps", ...),
            "warmup_min_ratio": ("first_part", None),
            "warmup_num_steps": ("warmup_steps", None),
            "cos_min_ratio": ("last_part", None),
            "warmup_type": ("shape", None),
        },
    ),
    "OneCycle": _Kind(
        "OneCycle",
        {
            "cycle_min_lr": ("lowest", ...),
            "cycle_max_lr": ("highest", ...),
            "decay_lr_rate": ("decay", None),
            "cycle_first_step_size": ("up_steps", None),
            "cycle_second_step_size": ("down_steps", None),
            "cycle_first_stair_count": ("up_stairs", None),
            "cycle_second_stair_count": ("down_stairs", None),
            "decay_step_size": ("decay_every", None),
            "cycle_momentum": ("cycle_momentum", None),
            "cycle_min_mom": ("lowest_momentum", None),
            "cycle_max_mom": ("highest_momentum", None),
            "decay_mom_rate": ("momentum_decay", None),
        },
    ),
    "LRRangeTest": _Kind(
        "RangeTest",
        {
            "lr_range_test_min_lr": ("lowest", None),
            "lr_range_test_step_size": ("every", None),
            "lr_range_test_step_rate": ("growth", None),
            "lr_range_test_staircase": ("staircase", None),
        },
    ),
}


def translate_scheduler(t: Translation) -> None:
    """Decide the learning rate's schedule."""
    given = t.value(TYPE)
    if not isinstance(given, str):
        if t.paths(_PARAMS):
            t.refuse(f"{_PARAMS} without {TYPE}: of which scheduler? {did_you_mean('', KINDS, 'schedulers')}")
        elif t.has("optimizer.type"):
            t.note_absent("scheduler", "The learning rate follows what the module configures; there, it is constant.")
        return
    kind = KINDS.get(given)
    if kind is None:
        _other(t, given)
        return
    for path in t.paths(_PARAMS):
        name = path.removeprefix(f"{_PARAMS}.")
        if name not in kind.arguments and name != "last_batch_iteration":
            t.refuse(f"{path}: {given} takes no such argument; {did_you_mean(name, kind.arguments, 'arguments')}")
    t.set(f"{_NATIVE}._target_", "trainwright.callbacks.schedule.learning_rate_schedule.LearningRateSchedule", by=TYPE)
    t.set(f"{_NATIVE}.schedule._target_", f"{_SCHEDULES}.{kind.schedule}", by=TYPE)
    t.say(TYPE, MAPPED)
    for name, (argument, default) in kind.arguments.items():
        path = f"{_PARAMS}.{name}"
        value = _argument(t, given, path, default)
        if value is not None and value is not ...:
            t.set(f"{_NATIVE}.schedule.{argument}", value, by=path if t.has(path) else TYPE)
        t.say(path, MAPPED)


def _other(t: Translation, given: str) -> None:
    import torch.optim.lr_scheduler as of_torch

    if not hasattr(of_torch, given):
        t.refuse(f"{TYPE} is {given!r}; {did_you_mean(given, KINDS, 'schedulers')}")
        return
    t.say(TYPE, UNSUPPORTED, "Return it from the module's configure_optimizers; take the section out.", stops=True)
    for path in t.paths(_PARAMS):
        t.say(path, UNSUPPORTED, f"Of {given}: see {TYPE}.", stops=False)


def _argument(t: Translation, kind: str, path: str, default: Any) -> Any:
    value = t.value(path)
    if value is None:
        if default is ...:
            t.refuse(f"{kind} needs {path}; write a number")
        return default
    if value != AUTO:
        return value
    name = path.rsplit(".", 1)[1]
    if name == "warmup_min_lr":
        return 0.0
    if t.recipe is None:
        t.needs_recipe(path, "write a number")
        return ...
    filled = {
        "warmup_max_lr": _learning_rate(t),
        "warmup_num_steps": t.recipe.warmup_steps,
        "total_num_steps": t.recipe.max_steps,
    }[name]
    if filled is None:
        t.needs_recipe(path, "write a number")
        return ...
    return filled


def _learning_rate(t: Translation) -> Any:
    """That of the optimizer which the run will have."""
    typed = t.typed.value("optimizer.lr")
    if isinstance(typed, (int, float)):
        return typed
    given = t.value("optimizer.params.lr", AUTO)
    if given != AUTO and "optimizer" not in t.typed:
        return given
    return None if t.recipe is None else t.recipe.optimizer.get("lr")
