"""How the engines are told to cut a module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainwright.strategies.compose.rules import micro_batches_for
from trainwright.strategies.pipeline.schedules import stages_per_rank_of


@dataclass
class EngineOptions:
    """How a module is cut along the axes of a layout."""

    # Names (patterns with *) of the repeated blocks, like model.layers.*; null = found in the model.
    blocks: list[str] | None = None
    # Order of the pipeline's work: gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv, dualpipev.
    schedule: str = "1f1b"
    # Parts that a batch is split into for the pipeline; null = one per pipeline rank (two for zbv and dualpipev).
    micro_batches: int | None = None
    # Stages of the pipeline on each rank; null = 1, or 2 for schedules that need several.
    stages_per_rank: int | None = None
    # Blocks of each stage, like [3,5]; balanced = alike in number of parameters.
    split: Any = "balanced"
    # Tensors of a batch whose samples are not along dim 0: path in the batch -> dim; null = whole for all.
    batch_dims: dict[str, int | None] = field(default_factory=dict)
    # Split activations between cut modules along the sequence over the tensor axis; false = off.
    sequence_parallel: bool = False
    # Compute the loss on logits split over the tensor axis; false = off.
    loss_parallel: bool = False
    # How context ranks exchange keys and values: ring, ulysses or gather.
    attention: str = "ring"
    # Deal the sequence so that causal attention costs every context rank the same; false = contiguous parts.
    balance: bool = True
    # What the model allows, where it is not found or found wrong: tensor, heads, whole_inputs, first, last, experts.
    plan: dict[str, Any] = field(default_factory=dict)

    def stages(self, pipeline: int) -> int:
        """Number of stages on ``pipeline`` ranks."""
        return pipeline * stages_per_rank_of(self.schedule, self.stages_per_rank)

    def micro_batches_for(self, pipeline: int) -> int:
        """Micro-batches that a batch is split into."""
        return micro_batches_for(self.schedule, self.micro_batches, pipeline)


def engine_options_of(options: Any) -> EngineOptions:
    """How the engines are told to cut a module: by options with axes; of others (or ``None``), where its blocks are."""
    if isinstance(options, EngineOptions):
        return options
    return EngineOptions(blocks=None if options is None else options.blocks)
