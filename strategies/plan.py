"""What a model allows: its repeated blocks, how each weight may be cut, what stands before and after the blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

TensorStyle = Literal["colwise", "rowwise", "colwise_gather", "vocabulary", "packed_colwise"]


@dataclass(frozen=True)
class ModelPlan:
    """Where a module can be cut. All names are fully qualified names in the LightningModule.

    Args:
        blocks: names of the repeated blocks in the order in which they run; empty if there are none.
        tensor: name of a module -> how its weights are split over the tensor axis:
            ``colwise`` splits outputs (the next must be ``rowwise``), ``rowwise`` splits inputs and sums the outputs,
            ``colwise_gather`` splits outputs and gathers them (an output head), ``vocabulary`` splits the rows of an
            embedding, ``packed_colwise`` splits each of several equal projections that share one matrix
            (``packed_colwise:3``, or sections as ``packed_colwise:64,32,32``).
        heads: name of a module -> names of its integer attributes that count heads or features of split outputs, to be
            divided by the size of the tensor axis.
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
    whole_inputs: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    experts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
