"""The compressors by name, their options, and what is wrong with some. Loads no torch: the command line asks, too."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from trainwright.core.config.options import is_number, is_whole, refuse

OFF = "none"
_FLOATS = ("fp32", "fp16", "bf16")


@dataclass
class CompressionConfig:
    """`compression=none|fp16|bf16`: how gradients are sent between replicas."""

    # none, fp16, bf16, int8, topk, powersgd or onebit.
    name: str = "none"


@dataclass
class Int8CompressionConfig(CompressionConfig):
    """`compression=int8`: a byte a number."""

    name: str = "int8"
    # Numbers that share a scale.
    block: int = 256


@dataclass
class TopKCompressionConfig(CompressionConfig):
    """`compression=topk`: the largest numbers and their places."""

    name: str = "topk"
    # Part of the numbers that is sent; 1 = all.
    ratio: float = 0.01
    # How they are written: fp32, fp16, bf16 or int8.
    values: str = "fp32"
    # What is compressed: gradients, or steps of Adam after the warm-up; auto = steps where there are any.
    sends: str = "auto"
    # Optimizer steps at the beginning in which gradients are averaged as they are; 0 = off.
    warmup_steps: int = 100


@dataclass
class PowerSGDCompressionConfig(CompressionConfig):
    """`compression=powersgd`: two thin factors of each matrix."""

    name: str = "powersgd"
    # Columns of the factors.
    rank: int = 4
    # Steps of subspace iteration for each average, each of which sends both factors.
    iterations: int = 2
    # Tensors that would not become shorter by this factor are sent as they are.
    least_gain: float = 2.0
    # How factors are written: fp32, fp16 or bf16.
    values: str = "bf16"
    # What is compressed: gradients, or steps of Adam after the warm-up; auto = steps where there are any.
    sends: str = "auto"
    # Optimizer steps at the beginning in which gradients are averaged as they are; 0 = off.
    warmup_steps: int = 100


@dataclass
class OneBitCompressionConfig(CompressionConfig):
    """`compression=onebit`: the signs of Adam's momentum."""

    name: str = "onebit"
    # Numbers that share a scale, a multiple of 8.
    block: int = 2048
    # Optimizer steps in which gradients are averaged as they are, while Adam's variance is learned.
    warmup_steps: int = 100


CONFIGS: dict[str, type[CompressionConfig]] = {
    "none": CompressionConfig,
    "int8": Int8CompressionConfig,
    "topk": TopKCompressionConfig,
    "powersgd": PowerSGDCompressionConfig,
    "onebit": OneBitCompressionConfig,
}
"""Options of each compressor, with their defaults; those that are missing have none."""
# Name -> its options with their defaults.
_OPTIONS: dict[str, dict[str, Any]] = {
    name: {each.name: each.default for each in fields(CONFIGS.get(name, CompressionConfig)) if each.name != "name"}
    for name in ("fp16", "bf16", "int8", "topk", "powersgd", "onebit")
}
# How values that are picked, or factors, may be written.
_VALUES = {"topk": (*_FLOATS, "int8"), "powersgd": _FLOATS}
# What is compressed: gradients before the optimizer sees them, or within Adam's steps; auto: steps where there are any.
_SENDS = ("auto", "gradients", "steps")
# Options of averages of gradients alone: a message by itself, or an outer gradient, has none of it.
ONLY_OF_AVERAGES = ("sends", "warmup_steps")
# Those that add to a message what earlier ones lacked.
_WITH_RESIDUAL = ("topk", "powersgd", "onebit")
REMOVED = {
    "randomk": (
        "was removed; type compression=topk, which sends as little with less error, or compression=powersgd, which "
        "sends still less"
    )
}
"""Names of earlier versions, each with what to type instead."""


@dataclass(frozen=True)
class CompressionChoice:
    """A compressor that was asked for.

    Args:
        name: one of :func:`compressor_names`.
        options: those that were given.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keeps_residual(self) -> bool:
        """Whether what a message lacks is added to the next one."""
        return self.name in _WITH_RESIDUAL

    @property
    def warmup_steps(self) -> int:
        """Optimizer steps at the beginning in which gradients are averaged as they are; 0: none."""
        return int(self.option("warmup_steps")) if "warmup_steps" in _OPTIONS[self.name] else 0

    @property
    def sends(self) -> str:
        """What is compressed: ``"gradients"``, ``"steps"`` of Adam, or ``"auto"``: steps where they can be."""
        if self.name == "onebit":
            return "steps"
        return str(self.option("sends")) if "sends" in _OPTIONS[self.name] else "gradients"

    @property
    def needs_adam(self) -> bool:
        """Whether nothing else will do than Adam's steps."""
        return self.sends == "steps"

    @property
    def asked(self) -> str:
        """How that is typed."""
        return f"compression={self.name}" + ("" if self.name == "onebit" else f" compression.sends={self.sends}")

    @property
    def instead(self) -> str:
        """What to type where Adam's steps cannot be had, as it begins."""
        return "type compression=topk" if self.name == "onebit" else "type compression.sends=auto"

    def option(self, key: str) -> Any:
        """An option as it was given, or its default."""
        return self.options.get(key, _OPTIONS[self.name][key])


def compressor_names() -> tuple[str, ...]:
    """Names that ``compression=`` takes, beside ``none``."""
    return tuple(_OPTIONS)


def option_defaults(name: str) -> dict[str, Any]:
    """The options of the compressor called ``name``, and their defaults."""
    return dict(_OPTIONS[name])


def of_one_message(given: Mapping[str, Any]) -> dict[str, Any]:
    """A choice without the options of averages of gradients, which one message alone has none of.

    One that is not at its default was typed: it stays, and is refused.
    """
    defaults = _OPTIONS.get(given["name"], {})
    return {key: value for key, value in given.items() if key not in ONLY_OF_AVERAGES or value != defaults.get(key)}


def compression_problems(compression: Any) -> list[str]:
    """What is wrong with a choice of compression, each with what to type instead; empty when nothing is.

    Args:
        compression: a name, a mapping of ``name`` and options, or ``None``.
    """
    if compression is None or compression == OFF:
        return []
    if isinstance(compression, str):
        return _name_problems(compression)
    if not isinstance(compression, Mapping):
        return [f"compression={compression!r}: must be a name, a mapping with name and options, or None (off)"]
    given = dict(compression)
    name = given.pop("name", None)
    if name is None:
        return [f"compression={dict(compression)}: has no name; name one of {OFF}, {', '.join(_OPTIONS)}"]
    if name == OFF:
        return [f"compression={OFF} has no options, got {', '.join(map(str, given))}"] if given else []
    problems = _name_problems(name) or [
        problem for key, value in given.items() for problem in _option_problems(name, str(key), value)
    ]
    if not problems and given.get("sends") == "steps" and given.get("warmup_steps") == 0:
        return [
            f"compression.sends=steps with compression.warmup_steps=0 for {name}: Adam has no variance before a "
            "warm-up; type compression.warmup_steps=100, or compression.sends=gradients"
        ]
    return problems


def choose_compression(compression: str | Mapping[str, Any] | None) -> CompressionChoice | None:
    """What the argument ``compression`` of a strategy asks for; ``None`` is off.

    Args:
        compression: a name (``"topk"``), a mapping (``{"name": "topk", "ratio": 0.01}``), or ``None`` or ``"none"``.

    Raises:
        ValueError: if there is no such compressor or option, or a value is out of its range.
    """
    problems = compression_problems(compression)
    refuse(problems)
    if compression is None or compression == OFF:
        return None
    if isinstance(compression, str):
        return CompressionChoice(compression)
    options = {str(key): value for key, value in compression.items() if key != "name"}
    return None if compression["name"] == OFF else CompressionChoice(str(compression["name"]), options)


def nothing_to_compress(name: str) -> str:
    """What to say where no rank holds a copy of what another one holds."""
    return (
        f"compression={name} with replicate=1: what is compressed is the average over replicas, and there is only one; "
        "type strategy.replicate=2 (or more) with a strategy that has it, or strategy=ddp on several devices, or "
        "compression=none"
    )


def scaled_steps_problem(choice: CompressionChoice) -> str:
    """What to say of averages within Adam's steps under a loss scale."""
    return (
        f"{choice.asked} with precision=16-mixed: replicas are averaged in the optimizer's step, too late to drop one "
        f"that overflowed; type precision=bf16-mixed, or {choice.instead.removeprefix('type ')}"
    )


def _name_problems(name: Any) -> list[str]:
    if name in _OPTIONS:
        return []
    if name in REMOVED:
        return [f"compression={name} {REMOVED[name]}"]
    near = difflib.get_close_matches(str(name), [OFF, *_OPTIONS], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return [f"Unknown compression {name!r}.{hint} Available: {OFF}, {', '.join(_OPTIONS)}."]


def _option_problems(name: str, key: str, value: Any) -> list[str]:
    allowed = _OPTIONS[name]
    if key not in allowed:
        near = difflib.get_close_matches(key, allowed, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        known = f"It takes {', '.join(allowed)}." if allowed else "It takes none."
        return [f"compression={name} has no option {key!r}.{hint} {known}"]
    rule = _RULES[key](name, value)
    return [] if rule is None else [f"compression.{key}={value} for {name}: must be {rule}"]


def _block_rule(name: str, value: Any) -> str | None:
    if name == "onebit":
        return None if is_whole(value, 8) and value % 8 == 0 else "a positive multiple of 8 (eight signs make a byte)"
    return None if is_whole(value, 1) else "a whole number of at least 1 (numbers that share a scale)"


def _ratio_rule(_: str, value: Any) -> str | None:
    return None if is_number(value) and 0 < value <= 1 else "above 0 and at most 1, like 0.01 (1 sends all)"


def _sends_rule(name: str, value: Any) -> str | None:
    return None if value in _SENDS else f"one of {', '.join(_SENDS)}"


def _warmup_rule(name: str, value: Any) -> str | None:
    if name == "onebit":
        return None if is_whole(value, 1) else "a whole number of at least 1 (optimizer steps)"
    return None if is_whole(value, 0) else "a whole number of optimizer steps, 0 (off) or more"


def _values_rule(name: str, value: Any) -> str | None:
    return None if value in _VALUES[name] else f"one of {', '.join(_VALUES[name])}"


# Option -> what a value of it must be, where the given one is not.
_RULES: dict[str, Any] = {
    "block": _block_rule,
    "ratio": _ratio_rule,
    "values": _values_rule,
    "sends": _sends_rule,
    "iterations": lambda _, value: None if is_whole(value, 1) else "a whole number of at least 1 (rounds of two sends)",
    "rank": lambda _, value: None if is_whole(value, 1) else "a whole number of at least 1 (columns)",
    "least_gain": lambda _, value: (
        None if is_number(value) and value >= 1 else "a number of at least 1 (how much shorter a tensor must become)"
    ),
    "warmup_steps": _warmup_rule,
}
