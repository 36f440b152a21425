"""Options of the engines that partition a module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainwright.strategies.compose.rules import micro_batches_for
from trainwright.strategies.pipeline.schedules import stages_per_rank_of


@dataclass
class EngineOptions:
    """How a module is partitioned along the axes of a layout."""

    # Names (patterns with *) of the repeated blocks, like model.layers.*; null = detected.
    blocks: list[str] | None = None
    # Pipeline schedule: gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv, dualpipev.
    schedule: str = "1f1b"
    # Micro-batches per batch in a pipeline; null = one per pipeline rank (two for zbv and dualpipev).
    micro_batches: int | None = None
    # Pipeline stages on each rank; null = 1, or 2 for schedules that need several.
    stages_per_rank: int | None = None
    # Blocks of each stage, like [3,5]; balanced = similar numbers of parameters.
    split: Any = "balanced"
    # Dtype in which fp32 hidden states and their gradients are sent between pipeline stages: bf16 or fp16; null = as
    # computed.
    stage_dtype: str | None = None
    # Batch tensors whose samples are not along dim 0: path in the batch -> dim; null = not split.
    batch_dims: dict[str, int | None] = field(default_factory=dict)
    # Split activations between tensor-parallel modules along the sequence; false = off.
    sequence_parallel: bool = False
    # Compute the loss on logits split over the tensor axis; false = off.
    loss_parallel: bool = False
    # How context ranks exchange keys and values: ring, ulysses or gather.
    attention: str = "ring"
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
