"""Options of the strategies that stand for another one: ``strategy=auto`` and ``strategy=deepspeed_json``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from trainwright.core.layout import Layout
from trainwright.strategies.contract.options import MISSING, number
from trainwright.strategies.data.zero_options import OFFLOADS, STAGES

AUTO_TARGET = "trainwright.command.auto"
MICRO_BATCH = "micro_batch_size"


@dataclass
class AutoOptions:
    """`strategy=auto`: the planner's choice for this machine; what is given here is not left to it."""

    _target_: str = AUTO_TARGET
    # Ranks that hold different stages of the model; null = the planner decides, as with all of these.
    pipeline: int | None = number(None, least=-1)
    # Number of copies of the state; null = the planner decides.
    replicate: int | None = number(None, least=-1)
    # Ranks that share one copy; null = the planner decides.
    shard: int | None = number(None, least=-1)
    # Ranks that split the sequence of the same samples; null = the planner decides.
    context: int | None = number(None, least=-1)
    # Ranks that split each weight of a layer; null = the planner decides.
    tensor: int | None = number(None, least=-1)
    # Ranks that hold different experts; null = the planner decides.
    expert: int | None = number(None, least=-1)
    # ZeRO stage, 0 = none of it (single, ddp); null = the planner decides.
    stage: int | None = None
    # What lives in host memory between steps: none, optimizer or parameters; null = the planner decides.
    offload: str | None = None
    # Recompute activations in the backward pass: none or full; null = the planner decides.
    activation_checkpointing: str | None = None
    # Order of the pipeline's work: 1f1b or interleaved_1f1b; null = the planner decides.
    schedule: str | None = None
    # Parts that a batch is split into for the pipeline; null = the planner decides.
    micro_batches: int | None = None
    # Stages of the pipeline on each rank; null = the planner decides.
    stages_per_rank: int | None = None
    # Split activations between cut modules along the sequence over the tensor axis; null = where it is possible.
    sequence_parallel: bool | None = None
    # Compute the loss on logits split over the tensor axis; null = where it is possible.
    loss_parallel: bool | None = None
    # Largest bucket of gradients that is sent at once (ddp, stages 1 and 2), in MiB; null = what fits the links.
    bucket_mib: float | None = None
    # How gradients are averaged over replicas: all_reduce, reduce_scatter or hierarchical; null = what fits the links.
    average_by: str | None = None
    # Blocks whose parameters stage 3 gathers ahead; null = what fits the links and the memory.
    prefetch: int | None = None
    # Plain keys that are not chosen: micro_batch_size, which is among them where it is typed; [] = none.
    keep: list[str] = field(default_factory=list)
    # Names (patterns with *) of the repeated blocks, like model.layers.*; null = found in the model.
    blocks: list[str] | None = None
    # Compile each block with torch.compile; false = off.
    compile: bool = False
    # The comparison with the module as written before the first step: refuse, warn or off.
    certificate: str = "refuse"
    # Tensors of a batch whose samples are not along dim 0: path in the batch -> dim; null = whole for all.
    batch_dims: dict[str, int | None] = field(default_factory=dict)
    # How context ranks exchange keys and values: ring, ulysses or gather.
    attention: str = "ring"
    # What the model allows, where it is not found or found wrong: tensor, heads, whole_inputs, first, last, experts.
    plan: dict[str, Any] = field(default_factory=dict)

    def axes(self) -> dict[str, int]:
        """Sizes of the axes that have been decided."""
        given = {axis.name: getattr(self, axis.name) for axis in fields(Layout)}
        return {axis: size for axis, size in given.items() if size is not None}

    def problems(self, world_size: int) -> Iterator[str]:
        """What of it cannot be, on so many ranks."""
        small = {axis: size for axis, size in self.axes().items() if size < 1}
        for axis, size in small.items():
            yield f"strategy.{axis}={size} with strategy=auto: type a size of at least 1, or leave it out"
        ranks = {} if small else {axis: size for axis, size in self.axes().items() if axis in Layout().sizes}
        product = math.prod(ranks.values())
        if world_size % product:
            given = " x ".join(f"{axis} {size}" for axis, size in ranks.items())
            yield f"strategy=auto with {given}: {product} is no divisor of {world_size} ranks; type other sizes"
        allowed = {"stage": (0, *STAGES), "offload": OFFLOADS, "activation_checkpointing": ("none", "full")}
        for option, words in allowed.items():
            given = getattr(self, option)
            if given is not None and given not in words:
                named = ", ".join(map(str, words))
                yield f"strategy.{option}={given} with strategy=auto: allowed: {named}; null leaves it to the planner"
        unknown = [key for key in self.keep if key != MICRO_BATCH]
        if unknown:
            yield f"strategy.keep={unknown}: allowed: {MICRO_BATCH}"


@dataclass
class DeepSpeedJSONOptions:
    """`strategy=deepspeed_json`: put in place of it is what a DeepSpeed JSON stands for, see docs/deepspeed.md."""

    _target_: str = "trainwright.tools.deepspeed.expand.not_expanded"
    # Path of the JSON.
    path: str | None = MISSING
