"""scheduler: the callback `learning_rate_schedule`, which replaces the module's scheduler."""

from __future__ import annotations

from typing import Any

from trainwright.core.problems import did_you_mean
from trainwright.tools.deepspeed.table import AUTO, KEYS, UNSUPPORTED
from trainwright.tools.deepspeed.translation import Translation

TYPE = "scheduler.type"
_PARAMS = "scheduler.params"
_NATIVE = "callbacks.learning_rate_schedule"

# Type -> class of `trainwright.callbacks.schedule.schedules`, and its keys.
_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")
_COSINE = ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type")
_NAMES = [path.removeprefix(f"{_PARAMS}.") for path in KEYS if path.startswith(_PARAMS)]
SCHEDULERS = {
    "WarmupLR": ("Warmup", _WARMUP),
    "WarmupDecayLR": ("WarmupDecay", (*_WARMUP, "total_num_steps")),
    "WarmupCosineLR": ("WarmupCosine", _COSINE),
    "OneCycle": ("OneCycle", tuple(name for name in _NAMES if name.startswith(("cycle_", "decay_")))),
    "LRRangeTest": ("RangeTest", tuple(name for name in _NAMES if name.startswith("lr_range_test_"))),
}
_REQUIRED = ("total_num_steps", "cycle_min_lr", "cycle_max_lr")


def translate_scheduler(t: Translation) -> None:
    """Decide the learning rate's schedule."""
    given = t.value(TYPE)
    if given is None:
        if t.paths(_PARAMS):
            t.refuse(f"{_PARAMS} without {TYPE}; {did_you_mean('', SCHEDULERS, 'schedulers')}")
        elif t.has("optimizer.type"):
            t.note_absent("scheduler", "The module's schedule is used; in DeepSpeed the learning rate is constant.")
        return
    if given not in SCHEDULERS:
        _other(t, given)
        return
    schedule, names = SCHEDULERS[given]
    for path in t.paths(_PARAMS):
        name = path.removeprefix(f"{_PARAMS}.")
        if path in KEYS and name not in names:
            t.refuse(f"{path}: {given} has no such argument; {did_you_mean(name, names, 'arguments')}")
    t.set(f"{_NATIVE}._target_", "trainwright.callbacks.schedule.learning_rate_schedule.LearningRateSchedule", by=TYPE)
    t.set(f"{_NATIVE}.schedule._target_", f"trainwright.callbacks.schedule.schedules.{schedule}", by=TYPE)
    for name in names:
        path = f"{_PARAMS}.{name}"
        default = 0.001 if (given, name) == ("WarmupDecayLR", "warmup_max_lr") else None
        value = _argument(t, path, default)
        if value is not None:
            t.set(f"{_NATIVE}.schedule.{KEYS[path].becomes}", value, by=path if t.has(path) else TYPE)
        elif name in _REQUIRED and not t.has(path):
            t.refuse(f"{given} needs {path}; write a number")


def _other(t: Translation, given: str) -> None:
    from torch.optim import lr_scheduler

    if hasattr(lr_scheduler, given):
        t.say(TYPE, UNSUPPORTED, "Return it from the module's configure_optimizers; remove the section.", stops=True)
    else:
        t.refuse(f"{TYPE} is {given!r}; {did_you_mean(given, SCHEDULERS, 'schedulers')}")


def _argument(t: Translation, path: str, default: float | None) -> Any:
    """Return the value of an argument; None leaves it to the class, or was refused."""
    value = t.value(path, default)
    if value != AUTO:
        return value
    name = path.rpartition(".")[2]
    if name == "warmup_min_lr":
        return 0.0
    filled: dict[str, Any] = {}
    if t.recipe is not None:
        filled = {
            "warmup_max_lr": _learning_rate(t),
            "warmup_num_steps": t.recipe.warmup_steps,
            "total_num_steps": t.recipe.max_steps,
        }
    if filled.get(name) is None:
        t.needs_recipe(path, "write a number")
    return filled.get(name)


def _learning_rate(t: Translation) -> Any:
    """Return the learning rate of the run's optimizer."""
    typed = t.typed.value("optimizer.lr")
    if isinstance(typed, (int, float)):
        return typed
    given = t.value("optimizer.params.lr", AUTO)
    if given != AUTO and "optimizer" not in t.typed:
        return given
    return None if t.recipe is None else t.recipe.optimizer.get("lr")
