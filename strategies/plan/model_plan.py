"""Plan of a model: its repeated blocks, how each weight may be split, and what runs before and after the blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

_PACKED = re.compile(r"packed_colwise:\d+(,\d+)*")
_EMPTY: Mapping[str, Any] = MappingProxyType({})


def base_style(style: str) -> str:
    """Return a tensor style without its sections: ``packed_colwise`` for ``packed_colwise:3``."""
    return style.partition(":")[0]


@dataclass(frozen=True)
class ModelPlan:
    """How a module can be split. All names are fully qualified names in the LightningModule.

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
        narrow: names of modules with split projections that read the width of the split features from their input
            (``B, N, C = x.shape``): their input is narrowed to a rank's share of the features.
        gathered: names of modules that need all features between split projections (a norm over all heads): where they
            are given split ones, these are gathered.
        summed: names of replicated parameters that act on split features, whose gradients are summed over ranks.
        whole_inputs: names of modules (attention, feed-forward) that need the whole sequence of their first tensor
            input under sequence parallelism.
        first: names of modules and parameters outside of the blocks that run before them.
        last: names of modules and parameters outside of the blocks that run after them.
        tied: groups of names of the same parameter.
        experts: name of a module that holds experts -> how it is split over the expert axis: ``stacked`` (parameters
            with one row per expert) or ``listed`` (a list of modules).
        sources: part of the plan -> its source, for messages.
    """

    blocks: tuple[str, ...] = ()
    tensor: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    heads: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    narrow: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    whole_inputs: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    experts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class PlanConfig:
    """User overrides of a :class:`ModelPlan`. Names are patterns of fully qualified names, one star per level.

    Fields that are not given are detected from the model.

    Args:
        blocks: patterns of the repeated blocks; replaces detection.
        tensor: pattern of modules -> style (see :class:`ModelPlan`), or ``none`` not to split them. Overrides detection
            module by module; later patterns override earlier ones.
        heads: pattern of modules -> attributes to divide; an empty list divides none. Overrides detection.
        whole_inputs: patterns of modules; replaces detection, an empty list is none.
        first: patterns of modules or parameters that run before the blocks.
        last: patterns of those that run after the blocks. A name in both lists is used in both places.
        experts: pattern of modules -> ``stacked``, ``listed``, or ``none`` not to split them. Overrides detection.
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
        """Return ``given`` as a validated configuration.

        Args:
            given: a configuration, a mapping of its fields (of a yaml file), or ``None``.
            origin: its name in messages.

        Raises:
            ValueError: listing all unknown fields and invalid values.
        """
        if isinstance(given, PlanConfig):
            values: dict[str, Any] = {part.name: getattr(given, part.name) for part in fields(given)}
        elif given is None or isinstance(given, Mapping):
            values = {str(key): value for key, value in (given or {}).items()}
        else:
            raise ValueError(f"{origin} is a {type(given).__name__} (allowed: a mapping with {_ALLOWED}).")
        problems = [f"{key}={value!r} (allowed: {_ALLOWED})" for key, value in values.items() if key not in _PARTS]
        values = {key: _plain(value) for key, value in values.items() if key in _PARTS and value is not None}
        problems += [problem for key, value in values.items() for problem in _problems(key, value)]
        if problems:
            raise ValueError(f"Impossible {origin}: {'; '.join(problems)}.")
        return cls(**values)


_PARTS = tuple(part.name for part in fields(PlanConfig))
_ALLOWED = ", ".join(_PARTS)
_MAPPINGS = ("tensor", "heads", "experts")
_STYLES = "colwise, rowwise, colwise_gather, vocabulary, packed_colwise:3 or packed_colwise:64,32,32, none"


def _plain(value: Any) -> Any:
    """Convert OmegaConf's containers to plain ones, and ``None`` (yaml's null) to ``none``."""
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
    allowed = "stacked, listed, none" if part == "experts" else _STYLES
    known = (lambda item: item in ("stacked", "listed", "none")) if part == "experts" else _is_style
    return [f"{part}[{key!r}]={item!r} (allowed: {allowed})" for key, item in value.items() if not known(item)]


def _list_problems(name: str, value: Any, example: str) -> list[str]:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return []
    return [f"{name}={value!r} (allowed: a list of names, such as [{example}])"]


def _is_style(style: object) -> bool:
    plain = ("colwise", "rowwise", "colwise_gather", "vocabulary", "none")
    return isinstance(style, str) and (style in plain or _PACKED.fullmatch(style) is not None)
