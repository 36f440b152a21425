"""Options of strategies that average gradients over replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainwright.core.config.options import is_number, is_whole
from trainwright.strategies.averaging.compression.options import OFF as UNCOMPRESSED
from trainwright.strategies.averaging.compression.options import compression_problems
from trainwright.strategies.contract.communication.options import (
    AVERAGES,
    HIERARCHICAL,
    IN_PARTS,
    OFF,
    WORDS,
    average_misfits,
    compressed_average,
)
from trainwright.strategies.contract.options import PlannedRun, StrategyOptions, unknown_word


@dataclass
class AveragedOptions(StrategyOptions):
    """Options of strategies that average gradients over replicas."""

    # Largest bucket of gradients sent at once, in MiB; null = 25, or the choice of communication=auto.
    bucket_mib: float | None = None
    # How gradients are averaged over replicas: all_reduce, reduce_scatter (and all-gather) or hierarchical (within a
    # node, then across nodes); null = all_reduce, or the fastest one with communication=auto.
    average_by: str | None = None
    # Consecutive ranks that share a node, for hierarchical averages; null = devices.
    ranks_per_node: int | None = None
    # Tuning of averages: advise = measure some steps and links and recommend options (communication.json); auto = also
    # apply those that change results by rounding only (average_by, bucket_mib, prefetch); none = off.
    communication: str = "none"
    # Compressor of averages: a name (fp16, bf16, int8, topk, ...) or its name and options, like {name: topk, ratio:
    # 0.01}; null = as set by the group compression.
    compression: Any = None

    averages_gradients = True

    @property
    def compressor(self) -> str | None:
        """Name of the compressor; ``None``: off."""
        name = self.compression.get("name") if hasattr(self.compression, "get") else self.compression
        return None if name in (None, UNCOMPRESSED) else str(name)

    def problems(self) -> Iterator[str]:
        """See the base class."""
        yield from super().problems()
        if self.bucket_mib is not None and (not is_number(self.bucket_mib) or self.bucket_mib <= 0):
            yield f"strategy.bucket_mib={self.bucket_mib}: must be above 0 (MiB); leave it out for the default"
        yield from unknown_word("communication", self.communication, WORDS)
        yield from self._compression_problems()
        if self.averages_gradients:
            yield from self._average_problems()

    def _compression_problems(self) -> Iterator[str]:
        yield from compression_problems(self.compression)

    def _average_problems(self) -> Iterator[str]:
        average_by, per_node = self.average_by, self.ranks_per_node
        if average_by is not None:
            yield from unknown_word("average_by", average_by, AVERAGES)
        if self.compressor is not None:
            yield from compressed_average(average_by, self.compressor)
        if per_node is None:
            return
        if not is_whole(per_node, 1):
            yield f"strategy.ranks_per_node={per_node}: must be a whole number of at least 1"
        elif self.communication == OFF and average_by != HIERARCHICAL:
            yield (
                f"strategy.ranks_per_node={per_node} has no effect: only hierarchical averages depend on nodes. Leave "
                "it out, or type strategy.average_by=hierarchical (or strategy.communication=auto)"
            )

    def run_problems(self, run: PlannedRun) -> Iterator[str]:
        """See the base class."""
        yield from super().run_problems(run)
        group = run.cfg.compression.name
        if group != UNCOMPRESSED and self.compression is not None:
            yield (
                f"compression={group} with strategy.compression={self.compression}: both set the compression of the "
                "same averages; type compression=none, or strategy.compression=null"
            )
        if self.averages_gradients and self.average_by in (IN_PARTS, HIERARCHICAL):
            yield from self._average_beside(run)

    def _average_beside(self, run: PlannedRun) -> Iterator[str]:
        launch, average_by, group = run.cfg.launch, str(self.average_by), run.cfg.compression.name
        if group != UNCOMPRESSED:
            yield from compressed_average(average_by, group)
            return
        if run.layout is not None and run.devices is not None and not list(self._average_problems()):
            yield from average_misfits(average_by, self.ranks_per_node or run.devices, run.layout)
        if launch.recovery == "replicas":
            yield (
                f"strategy.average_by={average_by} with launch.recovery=replicas: its process groups would contain "
                "lost ranks. Type launch.recovery=restart, or strategy.average_by=all_reduce"
            )
        if average_by == HIERARCHICAL and launch.min_devices is not None:
            yield (
                f"strategy.average_by=hierarchical with launch.min_devices={launch.min_devices}: with fewer devices, "
                "nodes would hold unequal numbers of replicas. Leave one of them out"
            )
