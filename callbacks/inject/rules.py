"""Validation of injected faults. Free of heavy imports, for the command line."""

from __future__ import annotations

import math
import signal as signals
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainwright.core.config.options import checked, number, value_problems, word

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
    schema = _ARGUMENTS_OF.get(kind, _Arguments)
    found = [f"{kind}: {problem}" for problem in value_problems(schema, arguments)]
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


def _are_ranks(value: Any) -> bool:
    several = [value] if isinstance(value, int) else value
    if not isinstance(several, list | tuple) or not several:
        return False
    return all(type(rank) is int and rank >= 0 for rank in several) and len(set(several)) == len(several)


def _are_seconds(value: Any) -> bool:
    several = value if isinstance(value, list | tuple) and len(value) == 2 else [value, value]
    return all(type(each) in (int, float) and 0 < each < math.inf for each in several) and several[0] <= several[1]


def _are_kinds(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(kind in SOAKED for kind in value)


def _is_name(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value != "")


def _is_error(value: Any) -> bool:
    return value is None or isinstance(value, Exception)


@dataclass
class _Arguments:
    """Arguments of all faults. Defaults are those of the functions."""

    rank: int | None = number(None, unit="a global rank", null="for all")
    ranks: Any = checked(None, _are_ranks, "a global rank, or a list of different ones: [1, 2]")
    at_step: int = number(None, unit="an optimizer step")
    from_step: int = number(None, unit="an optimizer step")
    to_step: int | None = number(None, least=1, unit="an optimizer step")
    step: int = number(None, least=1, unit="optimizer steps done at a save")
    times: int | None = number(None, least=1, null="for always")
    signal: int = number(None, least=1, most=signals.NSIG - 1)
    how: str = word(None, *HANGS)
    where: str = word(None, *PLACES)
    parameter: Any = checked(None, _is_name, "the name of a parameter, or None")
    hook: str = word(None, *HOOKS, STEP)
    error: Any = checked(None, _is_error, "an exception, like ValueError('why'), or None")
    code: int = number(None, most=255)
    factor: float = number(None, least=-math.inf)
    bit: int | None = number(None, most=_MOST_BITS - 1)
    seed: int = number(None)
    every_seconds: Any = checked(None, _are_seconds, "seconds, or their minimum and maximum: (20, 30)")
    kinds: Any = checked(None, _are_kinds, "a list of some of " + ", ".join(map(repr, SOAKED)))


@dataclass
class _OfSlow(_Arguments):
    factor: float = number(None, above=1)


@dataclass
class _OfCorruption(_Arguments):
    rank: int = number(None, unit="a global rank")


_ARGUMENTS_OF = {"slow": _OfSlow, "corrupt_checkpoint": _OfCorruption}
