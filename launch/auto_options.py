"""Options of the placeholder strategies ``strategy=auto`` and ``strategy=deepspeed_json``."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import MISSING

from trainwright.core.config.options import number, value_problems, word
from trainwright.core.layout import Layout
from trainwright.strategies.data.options import OFFLOADS

AUTO_TARGET = "trainwright.command.auto"
MICRO_BATCH = "micro_batch_size"
_PLANNED = "to leave it to the planner"


@dataclass
class AutoOptions:
    """`strategy=auto`: the planner chooses all options that are not set, for this machine."""

    _target_: str = AUTO_TARGET
    # Pipeline stages; null = chosen by the planner, as for every option below.
    pipeline: int | None = number(None, least=1, null=_PLANNED)
    # Replicas (copies of the training state); null = chosen by the planner.
    replicate: int | None = number(None, least=1, null=_PLANNED)
    # Ranks that shard one replica; null = chosen by the planner.
    shard: int | None = number(None, least=1, null=_PLANNED)
    # Ranks that split each sequence (context parallelism); null = chosen by the planner.
    context: int | None = number(None, least=1, null=_PLANNED)
    # Ranks that split each weight (tensor parallelism); null = chosen by the planner.
    tensor: int | None = number(None, least=1, null=_PLANNED)
    # Ranks that hold different experts; null = chosen by the planner.
    expert: int | None = number(None, least=1, null=_PLANNED)
    # ZeRO stage, 0 = none (single, ddp); null = chosen by the planner.
    stage: int | None = number(None, most=3, null=_PLANNED)
    # State kept in host memory between steps: none, optimizer or parameters; null = chosen by the planner.
    offload: str | None = word(None, *OFFLOADS)
    # Recompute activations in the backward pass: none or full; null = chosen by the planner.
    activation_checkpointing: str | None = word(None, "none", "full")
    # Pipeline schedule: 1f1b or interleaved_1f1b; null = chosen by the planner.
    schedule: str | None = None
    # Micro-batches that the pipeline splits a batch into; null = chosen by the planner.
    micro_batches: int | None = None
    # Pipeline stages per rank; null = chosen by the planner.
    stages_per_rank: int | None = None
    # Sequence parallelism: shard activations between tensor-parallel modules along the sequence; null = where possible.
    sequence_parallel: bool | None = None
    # Compute the loss on logits sharded over the tensor axis; null = where possible.
    loss_parallel: bool | None = None
    # Largest gradient bucket sent at once (ddp, stages 1 and 2), in MiB; null = chosen for the links.
    bucket_mib: float | None = None
    # Gradient averaging over replicas: all_reduce, reduce_scatter or hierarchical; null = chosen for the links.
    average_by: str | None = None
    # Blocks whose parameters stage 3 gathers ahead; null = chosen for the links and the memory.
    prefetch: int | None = None
    # Plain keys that the planner must not change: micro_batch_size (added when it is typed); [] = none.
    keep: list[str] = word(list, MICRO_BATCH)
    # Names of the repeated blocks (patterns with *), like model.layers.*; null = detected in the model.
    blocks: list[str] | None = None
    # Compile each block with torch.compile; false = off.
    compile: bool = False
    # Comparison with the unmodified module before the first step: refuse, warn or off.
    certificate: str = "refuse"
    # Tensors of a batch whose samples are not along dim 0: path in the batch -> dim, or null = replicated on all ranks.
    batch_dims: dict[str, int | None] = number(dict, least=-math.inf, null="for the whole tensor on all ranks")
    # How context ranks exchange keys and values: ring, ulysses or gather.
    attention: str = "ring"
    # Corrections to what is detected in the model: tensor, heads, whole_inputs, first, last, experts.
    plan: dict[str, Any] = field(default_factory=dict)

    def axes(self) -> dict[str, int]:
        """Return the sizes of the axes that are set."""
        given = {axis.name: getattr(self, axis.name) for axis in fields(Layout)}
        return {axis: size for axis, size in given.items() if size is not None}

    def problems(self, world_size: int) -> Iterator[str]:
        """Yield what is invalid on `world_size` ranks."""
        yield from value_problems(AutoOptions, vars(self), "strategy.")
        ranks = {axis: size for axis, size in self.axes().items() if axis in Layout().sizes and size >= 1}
        product = math.prod(ranks.values())
        if world_size % product:
            given = " x ".join(f"{axis} {size}" for axis, size in ranks.items())
            yield f"strategy=auto with {given}: {product} does not divide {world_size} ranks; type other sizes"


@dataclass
class DeepSpeedJSONOptions:
    """`strategy=deepspeed_json`: replaced by the settings of a DeepSpeed JSON, see docs/deepspeed.md."""

    _target_: str = "trainwright.tools.deepspeed.expand.not_expanded"
    # Path of the DeepSpeed JSON.
    path: str | None = MISSING
