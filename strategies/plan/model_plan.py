"""What a model allows: its repeated blocks, how each weight may be cut, what stands before and after the blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

_PACKED = re.compile(r"packed_colwise:\d+(,\d+)*")
_EMPTY: Mapping[str, Any] = MappingProxyType({})


def base_style(style: str) -> str:
    """A tensor style without its sections: ``packed_colwise:3`` is ``packed_colwise``."""
    return style.partition(":")[0]


@dataclass(frozen=True)
class ModelPlan:
    """Where a module can be cut. All names are fully qualified names in the LightningModule.

    Args:
        blocks: names of the repeated blocks in the order in which they run; empty if there are none.
        tensor: name of a module -> how its weights are split over the tensor axis:
            ``colwise`` splits outputs (the next must be ``rowwise``), ``rowwise`` splits inputs and sums the outputs,
            ``colwise_gather`` splits outputs and gathers them (an output head), ``vocabulary`` splits the rows of an
            embedding, ``packed_colwise`` splits each of several equal projections that share one matrix
            (``packed_colwise:3``, or sections as ``packed_colwise:64,32,32``). An ``nn.MultiheadAttention`` is
            ``packed_colwise:3`` and its ``out_proj`` is ``rowwise``.
        heads: name of a module -> names of its integer attributes that count heads or features of split outputs, to be
            divided by the size of the tensor axis.
        narrow: names of modules that hold split projections and take the width of what is split from their input
            (``B, N, C = x.shape``): they are given as many features of it as a rank has of the others.
        summed: names of whole parameters that work on split features, so that a rank has a part of their gradient.
        whole_inputs: names of the modules (attention, feed-forward) that need the whole sequence of their first tensor
            input under sequence parallelism.
        first: names of modules and parameters outside of the blocks that run before them.
        last: names of modules and parameters outside of the blocks that run after them.
        tied: groups of names of parameters that are one and the same.
        experts: name of a module that holds experts -> how it is split over the expert axis: ``stacked`` (parameters
            with one row per expert) or ``listed`` (a list of modules).
        sources: where each part came from, for messages: part -> source.
    """

    blocks: tuple[str, ...] = ()
    tensor: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    heads: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    narrow: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    whole_inputs: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    experts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class PlanConfig:
    """What a user says about a model. Names are patterns of fully qualified names, one star per level.

    Everything defaults to "say nothing": the other sources of a :class:`ModelPlan` decide.

    Args:
        blocks: patterns of the repeated blocks; replaces what would be found.
        tensor: pattern of modules -> style (see :class:`ModelPlan`), or ``none`` to leave them whole. Goes over what is
            found, module by module; later patterns go over earlier ones.
        heads: pattern of modules -> attributes to divide; an empty list divides none. Goes over what is found.
        whole_inputs: patterns of modules; replaces what would be found, an empty list is none.
        first: patterns of modules or parameters that run before the blocks; moves them there.
        last: the same for after the blocks. What is in both lists is used in both places.
        experts: pattern of modules -> ``stacked``, ``listed``, or ``none`` for not split. Goes over what is found.
    """

    blocks: Sequence[str] | None = None
    tensor: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    heads: Mapping[str, Sequence[str]] = field(default_factory=lambda: _EMPTY)
    whole_inputs: Sequence[str] | None = None
    first: Sequence[str] = ()
    last: Sequence[str] = ()
    experts: Mapping[str, str] = field(default_factory=lambda: _EMPTY)

    @classmethod
    def of(cls, given: PlanConfig | Mapping[str, Any] | None, origin: str = "plan") -> PlanConfig:
        """``given`` as a checked configuration.

        Args:
            given: a configuration, a mapping of its fields (of a yaml file), or ``None`` for nothing.
            origin: what to call it in messages.

        Raises:
            ValueError: if there is an unknown field, style or way to hold experts, or a field of the wrong kind; the
                message lists all.
        """
        if isinstance(given, PlanConfig):
            values: dict[str, Any] = {part.name: getattr(given, part.name) for part in fields(given)}
        elif given is None or isinstance(given, Mapping):
            values = {str(key): value for key, value in (given or {}).items()}
        else:
            raise ValueError(f"{origin} is a {type(given).__name__} (allowed: a mapping with {_parts()}).")
        problems = [f"{key}={value!r} (allowed: {_parts()})" for key, value in values.items() if key not in _PARTS]
        values = {key: _plain(value) for key, value in values.items() if key in _PARTS and value is not None}
        problems += [problem for key, value in values.items() for problem in _problems(key, value)]
        if problems:
            raise ValueError(f"Impossible {origin}: {'; '.join(problems)}.")
        return cls(**values)


_PARTS = tuple(part.name for part in fields(PlanConfig))
_MAPPINGS = ("tensor", "heads", "experts")


def _parts() -> str:
    return ", ".join(_PARTS)


def _plain(value: Any) -> Any:
    """Plain containers instead of a configuration library's, and ``None`` (yaml's null) as ``none``."""
    if isinstance(value, Mapping):
        return {str(key): "none" if item is None else _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _problems(part: str, value: Any) -> list[str]:
    if part not in _MAPPINGS:
        return _list_problems(part, value, "'model.layers.*'")
    if not isinstance(value, dict):
        return [f"{part}={value!r} (allowed: a mapping of names of modules)"]
    if part == "heads":
        pairs = [(f"heads[{key!r}]", item) for key, item in value.items()]
        return [problem for name, item in pairs for problem in _list_problems(name, item, "'num_heads'")]
    allowed = "stacked, listed, none" if part == "experts" else styles_text()
    known = (lambda item: item in ("stacked", "listed", "none")) if part == "experts" else is_style
    return [f"{part}[{key!r}]={item!r} (allowed: {allowed})" for key, item in value.items() if not known(item)]


def _list_problems(name: str, value: Any, example: str) -> list[str]:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return []
    return [f"{name}={value!r} (allowed: a list of names, such as [{example}])"]


def styles_text() -> str:
    """The styles that a configuration may give, for messages."""
    return "colwise, rowwise, colwise_gather, vocabulary, packed_colwise:3 or packed_colwise:64,32,32, none"


def is_style(style: object) -> bool:
    """Whether a configuration may give ``style``."""
    plain = ("colwise", "rowwise", "colwise_gather", "vocabulary", "none")
    return isinstance(style, str) and (style in plain or _PACKED.fullmatch(style) is not None)
