"""Validation of injected faults. Free of heavy imports, for the command line."""

from __future__ import annotations

import math
import signal as signals
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainwright.core.config.option_rules import Rule, is_positive, or_none
from trainwright.core.config.options import is_number, is_whole

HANGS = ("sleep", "lock", "gil", "skip_collective", "data")
"""Ways to hang."""
PLACES = ("loss", "gradient")
"""Where a NaN can be injected."""
SOAKED = ("kill", "stop", "exit", "partition")
"""Kinds that a soak draws from."""
STEP = "training_step"
"""The one hook of the module, besides those of callbacks, that can raise."""
_STAGES = ("train", "validation", "test", "predict")
HOOKS = (
    "setup", "teardown", "on_fit_start", "on_fit_end", "on_sanity_check_start", "on_sanity_check_end",
    *(f"on_{stage}{part}_{end}" for stage in _STAGES for part in ("", "_epoch", "_batch") for end in ("start", "end")),
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "on_save_checkpoint", "on_load_checkpoint", "on_exception",
)  # fmt: skip
"""Hooks of Lightning's callbacks."""

_MOST_BITS = 64


def problems_of(kind: str, arguments: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the arguments of the fault ``kind``, one message each.

    Args:
        kind: name of a function of :mod:`trainwright.callbacks.inject`.
        arguments: all of its arguments by name.
    """
    rules = {**_RULES, **_RULES_OF.get(kind, {})}
    found = [
        f"{kind}({name}={value!r}) (allowed: {rules[name][1]})"
        for name, value in arguments.items()
        if not rules[name][0](value)
    ]
    return found or _conflicts(kind, arguments)


def ranks_named(kind: str, arguments: Mapping[str, Any]) -> list[int]:
    """Return the global ranks that a fault names; empty for all."""
    named = arguments.get("ranks") if kind == "partition" else arguments.get("rank")
    if named is None:
        return []
    return [named] if isinstance(named, int) else list(named)


def step_named(arguments: Mapping[str, Any]) -> int | None:
    """Return the optimizer step of a fault; ``None`` if it has none."""
    return next((int(arguments[name]) for name in ("at_step", "from_step", "step") if name in arguments), None)


def _conflicts(kind: str, arguments: Mapping[str, Any]) -> list[str]:
    if kind == "nan" and arguments["parameter"] is not None and arguments["where"] == "loss":
        return [f"nan(parameter={arguments['parameter']!r}) needs where='gradient': a loss belongs to no parameter"]
    if kind == "slow" and arguments["to_step"] is not None and arguments["to_step"] <= arguments["from_step"]:
        given = f"from_step={arguments['from_step']}, to_step={arguments['to_step']}"
        return [f"slow({given}) (allowed: to_step above from_step, or None)"]
    return []


def _whole(least: int, most: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: is_whole(value, least) and value <= most


def _one_of(names: Sequence[str]) -> Rule:
    return (lambda value: value in names), ", ".join(map(repr, names))


def _are_ranks(value: Any) -> bool:
    several = [value] if isinstance(value, int) else value
    if not isinstance(several, list | tuple) or not several:
        return False
    return all(map(_whole(0), several)) and len(set(several)) == len(several)


def _are_seconds(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        return is_positive(value)
    return len(value) == 2 and all(map(is_positive, value)) and value[0] <= value[1]


def _are_kinds(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(kind in SOAKED for kind in value)


_RULES: dict[str, Rule] = {
    "rank": (or_none(_whole(0)), "a global rank: 0, 1, ..., or None for all"),
    "ranks": (_are_ranks, "a global rank, or a list of different ones: [1, 2]"),
    "at_step": (_whole(0), "an optimizer step: 0, 1, ..."),
    "from_step": (_whole(0), "an optimizer step: 0, 1, ..."),
    "to_step": (or_none(_whole(1)), "an optimizer step, or None"),
    "step": (_whole(1), "optimizer steps done at a save: 1, 2, ..."),
    "times": (or_none(_whole(1)), "1, 2, ..., or None for always"),
    "signal": (_whole(1, signals.NSIG - 1), "the number of a signal, like 9"),
    "how": _one_of(HANGS),
    "where": _one_of(PLACES),
    "parameter": (or_none(lambda value: isinstance(value, str) and value != ""), "the name of a parameter, or None"),
    "hook": _one_of((*HOOKS, STEP)),
    "error": (or_none(lambda value: isinstance(value, Exception)), "an exception, like ValueError('why'), or None"),
    "code": (_whole(0, 255), "0 to 255"),
    "factor": (is_number, "a number"),
    "bit": (or_none(_whole(0, _MOST_BITS - 1)), f"0 to {_MOST_BITS - 1}, or None"),
    "seed": (_whole(0), "0, 1, ..."),
    "every_seconds": (_are_seconds, "seconds, or their minimum and maximum: (20, 30)"),
    "kinds": (_are_kinds, "a list of some of " + ", ".join(map(repr, SOAKED))),
}
_RULES_OF: dict[str, dict[str, Rule]] = {
    "slow": {"factor": (lambda value: is_number(value) and value > 1, "more than 1")},
    "corrupt_checkpoint": {"rank": (_whole(0), "a global rank: 0, 1, ...")},
}
