"""Compressors, their options and validation. Loads no torch, for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from trainwright.core.config.options import checked, number, refuse, unknown_options, value_problems, word
from trainwright.core.problems import did_you_mean

OFF = "none"
_FLOATS = ("fp32", "fp16", "bf16")


def _fills_bytes(block: Any) -> bool:
    return type(block) is int and block > 0 and block % 8 == 0


@dataclass
class CompressionConfig:
    """`compression=none|fp16|bf16`: compression of gradients between replicas."""

    # none, fp16, bf16, int8, topk, powersgd or onebit.
    name: str = "none"


@dataclass
class Int8CompressionConfig(CompressionConfig):
    """`compression=int8`: one byte per number."""

    name: str = "int8"
    # Numbers per scale.
    block: int = number(256, least=1, unit="numbers that share a scale")


@dataclass
class TopKCompressionConfig(CompressionConfig):
    """`compression=topk`: the largest numbers and their indices."""

    name: str = "topk"
    # Fraction of numbers sent; 1 = all.
    ratio: float = number(0.01, above=0, most=1, unit="1 sends all")
    # Encoding of the numbers: fp32, fp16, bf16 or int8.
    values: str = word("fp32", *_FLOATS, "int8")
    # What is compressed: gradients, or steps of Adam after the warm-up; auto = steps if the optimizer is Adam.
    sends: str = word("auto", "auto", "gradients", "steps")
    # First optimizer steps, averaged without compression; 0 = off.
    warmup_steps: int = number(100, unit="optimizer steps, 0 is off")


@dataclass
class PowerSGDCompressionConfig(CompressionConfig):
    """`compression=powersgd`: two low-rank factors of each matrix."""

    name: str = "powersgd"
    # Rank of the factors.
    rank: int = number(4, least=1, unit="columns")
    # Subspace iterations per average, each of which sends both factors.
    iterations: int = number(2, least=1, unit="rounds of two sends")
    # Tensors shortened by less than this factor are sent uncompressed.
    least_gain: float = number(2.0, least=1, unit="how much shorter a tensor must become")
    # Encoding of the factors: fp32, fp16 or bf16.
    values: str = word("bf16", *_FLOATS)
    # What is compressed: gradients, or steps of Adam after the warm-up; auto = steps if the optimizer is Adam.
    sends: str = word("auto", "auto", "gradients", "steps")
    # First optimizer steps, averaged without compression; 0 = off.
    warmup_steps: int = number(100, unit="optimizer steps, 0 is off")


@dataclass
class OneBitCompressionConfig(CompressionConfig):
    """`compression=onebit`: the signs of Adam's momentum."""

    name: str = "onebit"
    # Numbers per scale, a multiple of 8.
    block: int = checked(2048, _fills_bytes, "a positive multiple of 8 (eight signs make a byte)")
    # First optimizer steps, averaged without compression while Adam's variance is learned.
    warmup_steps: int = number(100, least=1, unit="optimizer steps")


CONFIGS: dict[str, type[CompressionConfig]] = {
    "none": CompressionConfig,
    "int8": Int8CompressionConfig,
    "topk": TopKCompressionConfig,
    "powersgd": PowerSGDCompressionConfig,
    "onebit": OneBitCompressionConfig,
}
"""Options of compressors and their defaults; compressors missing here have none."""
_OPTIONS: dict[str, dict[str, Any]] = {
    name: {each.name: each.default for each in fields(CONFIGS.get(name, CompressionConfig)) if each.name != "name"}
    for name in ("fp16", "bf16", "int8", "topk", "powersgd", "onebit")
}
# Options of gradient averages that point-to-point messages and outer gradients do not have.
ONLY_OF_AVERAGES = ("sends", "warmup_steps")
# Compressors with error feedback.
_WITH_RESIDUAL = ("topk", "powersgd", "onebit")
REMOVED = {
    "randomk": (
        "was removed; type compression=topk, which sends as little with less error, or compression=powersgd, which "
        "sends still less"
    )
}
"""Removed names, with what to type instead."""


@dataclass(frozen=True)
class CompressionChoice:
    """Compressor and its given options.

    Args:
        name: one of :func:`compressor_names`.
        options: those that were given.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keeps_residual(self) -> bool:
        """True if the error of a message is added to the next one."""
        return self.name in _WITH_RESIDUAL

    @property
    def warmup_steps(self) -> int:
        """First optimizer steps, averaged without compression; 0: none."""
        return int(self.all_options.get("warmup_steps", 0))

    @property
    def sends(self) -> str:
        """Compressed quantity: ``"gradients"``, ``"steps"`` of Adam, or ``"auto"``."""
        return "steps" if self.name == "onebit" else str(self.all_options.get("sends", "gradients"))

    @property
    def needs_adam(self) -> bool:
        """True if only Adam's steps can be compressed."""
        return self.sends == "steps"

    @property
    def asked(self) -> str:
        """The choice, as typed."""
        return f"compression={self.name}" + ("" if self.name == "onebit" else f" compression.sends={self.sends}")

    @property
    def instead(self) -> str:
        """Text on what to type if Adam's steps are not available."""
        return "type compression=topk" if self.name == "onebit" else "type compression.sends=auto"

    @property
    def all_options(self) -> dict[str, Any]:
        """All options of the compressor, as given or by default."""
        return {**_OPTIONS[self.name], **self.options}


def compressor_names() -> tuple[str, ...]:
    """Return the allowed values of ``compression=``, except ``none``."""
    return tuple(_OPTIONS)


def message_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a choice without the options of gradient averages.

    Values other than the default were typed; they stay and are refused later.
    """
    defaults = _OPTIONS.get(given["name"], {})
    return {key: value for key, value in given.items() if key not in ONLY_OF_AVERAGES or value != defaults.get(key)}


def compression_problems(compression: Any) -> list[str]:
    """Return the problems of a choice of compression, each with what to type instead.

    Args:
        compression: a name, a mapping of ``name`` and options, or ``None``.
    """
    given = _with_name(compression)
    if not isinstance(given, Mapping):
        return [f"compression={compression!r}: must be a name, a mapping with name and options, or None (off)"]
    given, name = dict(given), given.get("name")
    if given.pop("name", None) is None:
        return [f"compression={given}: has no name; name one of {OFF}, {', '.join(_OPTIONS)}"]
    problems = [] if name == OFF else _name_problems(name)
    if not problems:
        schema = CONFIGS.get(str(name), CompressionConfig)
        problems = [*unknown_options(schema, given, f"compression={name} with compression.")]
        problems += value_problems(schema, given, "compression.")
    if not problems and given.get("sends") == "steps" and given.get("warmup_steps") == 0:
        return [
            f"compression.sends=steps with compression.warmup_steps=0 for {name}: Adam has no variance before a "
            "warm-up; type compression.warmup_steps=100, or compression.sends=gradients"
        ]
    return problems


def choose_compression(compression: str | Mapping[str, Any] | None) -> CompressionChoice | None:
    """Validate the ``compression`` argument of a strategy; ``None`` is off.

    Args:
        compression: a name (``"topk"``), a mapping (``{"name": "topk", "ratio": 0.01}``), or ``None`` or ``"none"``.

    Raises:
        ValueError: if there is no such compressor or option, or a value is out of range.
    """
    refuse(compression_problems(compression))
    options = {str(key): value for key, value in _with_name(compression).items()}
    name = str(options.pop("name"))
    return None if name == OFF else CompressionChoice(name, options)


def _with_name(compression: Any) -> Any:
    name = OFF if compression is None else compression
    return {"name": name} if isinstance(name, str) else name


def nothing_to_compress(name: str) -> str:
    """Return the error for compression without replicas."""
    return (
        f"compression={name} with replicate=1: compression applies to averages over replicas, and there is only one; "
        "type strategy.replicate=2 (or more), strategy=ddp on several devices, or compression=none"
    )


def scaled_steps_problem(choice: CompressionChoice) -> str:
    """Return the error for averages within Adam's steps under a loss scale."""
    return (
        f"{choice.asked} with precision=16-mixed: replicas are averaged in the optimizer's step, too late to skip one "
        f"that overflowed; type precision=bf16-mixed, or {choice.instead.removeprefix('type ')}"
    )


def _name_problems(name: Any) -> list[str]:
    if name in _OPTIONS:
        return []
    if name in REMOVED:
        return [f"compression={name} {REMOVED[name]}"]
    return [f"compression={name}: unknown; {did_you_mean(str(name), (OFF, *_OPTIONS), 'compressors')}"]
