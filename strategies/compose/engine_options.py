"""Options of the engines that partition a module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwright.core.config.options import checked, number, word
from trainwright.strategies.compose.rules import micro_batches_for
from trainwright.strategies.pipeline.schedules import CHOICES, stages_per_rank_of

ATTENTION = ("ring", "ulysses", "gather")


def is_split(split: object) -> bool:
    """Return whether an option is a number of blocks, at least 1, for each of some stages."""
    is_list = isinstance(split, Sequence) and not isinstance(split, str) and len(split) > 0
    return is_list and all(type(each) is int and each >= 1 for each in split)  # type: ignore[attr-defined]


@dataclass
class EngineOptions:
    """How a module is partitioned along the axes of a layout."""

    # Names (patterns with *) of the repeated blocks, like model.layers.*; null = detected.
    blocks: list[str] | None = None
    # Pipeline schedule: gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv, dualpipev.
    schedule: str = word("1f1b", *CHOICES)
    # Micro-batches per batch in a pipeline; null = one per pipeline rank (two for zbv and dualpipev).
    micro_batches: int | None = number(None, least=1, null="for the default")
    # Pipeline stages on each rank; null = 1, or 2 for schedules that need several.
    stages_per_rank: int | None = number(None, least=1, null="for the default")
    # Blocks of each stage, like [3,5]; balanced = similar numbers of parameters.
    split: Any = checked(
        "balanced",
        lambda split: split == "balanced" or is_split(split),
        "balanced, or the number of blocks of each stage, at least 1 each, such as strategy.split=[3,5]",
    )
    # Dtype in which fp32 hidden states and their gradients are sent between pipeline stages: bf16 or fp16; null = as
    # computed.
    stage_dtype: str | None = word(None, "bf16", "fp16")
    # Batch tensors whose samples are not along dim 0: path in the batch -> dim; null = not split.
    batch_dims: dict[str, int | None] = number(dict, least=-math.inf, null="for the whole tensor in each micro-batch")
    # Split activations between tensor-parallel modules along the sequence; false = off.
    sequence_parallel: bool = False
    # Compute the loss on logits split over the tensor axis; false = off.
    loss_parallel: bool = False
    # How context ranks exchange keys and values: ring, ulysses or gather.
    attention: str = word("ring", *ATTENTION)
    # Distribute the sequence so that causal attention costs the same on each context rank; false = contiguous parts.
    balance: bool = True
    # Parts of the parallel plan that are not detected, or detected wrongly: tensor, heads, whole_inputs, first, last,
    # experts.
    plan: dict[str, Any] = field(default_factory=dict)

    def stages(self, pipeline: int) -> int:
        """Return the number of stages on ``pipeline`` ranks."""
        return pipeline * stages_per_rank_of(self.schedule, self.stages_per_rank)

    def micro_batches_for(self, pipeline: int) -> int:
        """Return the number of micro-batches per batch."""
        return micro_batches_for(self.schedule, self.micro_batches, pipeline)


def engine_options_of(options: Any) -> EngineOptions:
    """Return engine options; of options without axes (or ``None``), only their blocks."""
    if isinstance(options, EngineOptions):
        return options
    return EngineOptions(blocks=None if options is None else options.blocks)
