"""A layout and the execution of a step on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainwright.core.layout import Layout
from trainwright.planning.memory.weights import Division

BUCKET_BYTES = 25 * 2**20
"""Of the buckets in which gradients are averaged: default of torch's DistributedDataParallel, and of ZeRO
(strategy.bucket_mib)."""


@dataclass(frozen=True)
class Work:
    """A layout and the execution of a step on it, as far as memory and time depend on it.

    Args:
        layout: closed.
        stage: of ZeRO over ``shard x context``; 0: none (``single``, ``ddp``).
        micro_batch: samples of a micro-batch; in a pipeline, of one of its parts.
        rounds: forward and backward passes of a data rank per step; in a pipeline, rounds of it.
        parts: micro-batches of a pipeline per round; 1 without.
        schedule, stages_per_rank: of the pipeline.
        offload: none, optimizer or parameters.
        no_sync: stages 2 and 3 reduce gradients once a step.
        prefetch: blocks that stage 3 gathers ahead; None: FSDP2's default.
    """

    layout: Layout = field(default_factory=Layout)
    stage: int = 0
    micro_batch: int = 1
    rounds: int = 1
    parts: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    offload: str = "none"
    no_sync: bool = False
    prefetch: int | None = None

    @property
    def has_pipeline(self) -> bool:
        """True if blocks are divided among pipeline ranks."""
        return self.layout.pipeline > 1

    @property
    def division(self) -> Division:
        """Division of parameters among ranks."""
        return Division.of(self.layout, self.stage)
