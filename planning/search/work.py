"""A layout and how a step is run on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainwright.core.layout import Layout
from trainwright.strategies.compose.rules import cuts_module
from trainwright.strategies.data.bucket_size import bucket_bytes_for

# Of torch's DistributedDataParallel, and of ZeRO's buckets (strategy.bucket_mib).
_BUCKET = 25 * 2**20


@dataclass(frozen=True)
class Work:
    """A layout and how a step is run on it, as far as memory and time depend on it.

    Args:
        layout: closed.
        stage: of ZeRO over ``shard x context``; 0: none (``single``, ``ddp``).
        micro_batch: samples of a micro-batch; in a pipeline, of one of its parts.
        rounds: forward and backward passes of a data rank in a step; in a pipeline, rounds of it.
        parts: micro-batches of a pipeline in a round; 1 without.
        schedule, stages_per_rank: of the pipeline.
        offload: none, optimizer or parameters.
        no_sync: stages 2 and 3 send gradients once a step.
        bucket_bytes: of the buckets in which gradients are averaged.
        prefetch: blocks that stage 3 gathers ahead; None: as FSDP2 does.
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
    bucket_bytes: float = _BUCKET
    prefetch: int | None = None

    @property
    def has_pipeline(self) -> bool:
        """Whether blocks are dealt out to ranks."""
        return self.layout.pipeline > 1

    @property
    def splits_parameters(self) -> bool:
        """Whether FSDP2 shards parameters: not those that a rank of a layout that cuts the module trains alone."""
        trains_alone = cuts_module(self.layout) and self.layout.replicate * self.layout.state_ranks == 1
        return self.stage == 3 and not trains_alone


def bucket_bytes(work: Work, whole: float) -> float:
    """Of ZeRO's reducer for so many bytes of parameters."""
    return bucket_bytes_for(work.bucket_bytes, whole)
