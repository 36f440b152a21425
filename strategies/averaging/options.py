"""Options of strategies that average gradients over replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainwright.core.config.options import class_of, number, word
from trainwright.strategies.averaging.compression.options import OFF as UNCOMPRESSED
from trainwright.strategies.averaging.compression.options import (
    CompressionChoice,
    choose_compression,
    compression_problems,
    nothing_to_compress,
    scaled_steps_problem,
)
from trainwright.strategies.contract.communication.options import (
    AVERAGES,
    HIERARCHICAL,
    IN_PARTS,
    OFF,
    WORDS,
    average_misfits,
    compressed_average,
)
from trainwright.strategies.contract.options import PlannedRun, StrategyOptions

_ADAM = ("Adam", "AdamW")


@dataclass
class AveragedOptions(StrategyOptions):
    """Options of strategies that average gradients over replicas."""

    # Largest bucket of gradients sent at once, in MiB; null = 25, or the choice of communication=auto.
    bucket_mib: float | None = number(None, above=0, unit="MiB", null="for the default")
    # How gradients are averaged over replicas: all_reduce, reduce_scatter (and all-gather) or hierarchical (within a
    # node, then across nodes); null = all_reduce, or the fastest one with communication=auto.
    average_by: str | None = word(None, *AVERAGES)
    # Consecutive ranks that share a node, for hierarchical averages; null = devices.
    ranks_per_node: int | None = number(None, least=1)
    # Tuning of averages: advise = measure some steps and links and recommend options (communication.json); auto = also
    # apply those that change results by rounding only (average_by, bucket_mib, prefetch); none = off.
    communication: str = word(OFF, *WORDS)
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
        yield from compression_problems(self.compression)
        if not self.averages_gradients:
            return
        average_by, per_node = self.average_by, self.ranks_per_node
        if self.compressor is not None:
            yield from compressed_average(average_by, self.compressor)
        if per_node is not None and self.communication == OFF and average_by != HIERARCHICAL:
            yield (
                f"strategy.ranks_per_node={per_node} has no effect: only hierarchical averages depend on nodes. Leave "
                "it out, or type strategy.average_by=hierarchical (or strategy.communication=auto)"
            )

    def run_problems(self, run: PlannedRun) -> Iterator[str]:
        """See the base class."""
        yield from super().run_problems(run)
        if not self.averages_gradients:
            return  # these send something other than gradients, and check compression themselves
        if self.compressor is None and self.average_by in (IN_PARTS, HIERARCHICAL):
            yield from self._average_beside(run)
        choice = None if compression_problems(self.compression) else choose_compression(self.compression)
        if choice is not None:
            yield from _choice_problems(choice, run)

    def _average_beside(self, run: PlannedRun) -> Iterator[str]:
        launch, average_by = run.cfg.launch, str(self.average_by)
        if run.layout is not None and run.devices is not None and not any(self.value_problems()):
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


def _choice_problems(choice: CompressionChoice, run: PlannedRun) -> Iterator[str]:
    """Yield what a compressor of averages cannot be combined with in a run."""
    if run.layout is not None and run.layout.replicate == 1:
        yield nothing_to_compress(choice.name)
    if not choice.needs_adam:
        return
    if run.cfg.precision == "16-mixed":
        yield scaled_steps_problem(choice)
    optimizer = class_of(run.cfg.optimizer)
    if optimizer and optimizer not in _ADAM:
        others = f"{choice.instead.removeprefix('type ')} or compression=powersgd"
        yield f"{choice.asked} with the optimizer {optimizer}: made for Adam; type optimizer=adamw, or {others}"
