"""Choices left to a plan by a configuration. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Limits:
    """Fixed parts of layouts and executions; `None` and missing axes are chosen by the planner.

    Args:
        axes: axis of the layout -> its size.
        stage: of ZeRO; 0: none (``single``, ``ddp``).
        offload: ``none``, ``optimizer`` or ``parameters``.
        activation_checkpointing: ``none`` or ``full``.
        schedule: of the pipeline.
        stages_per_rank: of the pipeline.
        micro_batches: of the pipeline.
        sequence_parallel: whether activations are split over the tensor axis.
        loss_parallel: whether logits are split.
        micro_batch_size: samples that a data rank reads at a time.
        accumulation: micro-batches per step.
    """

    axes: Mapping[str, int] = field(default_factory=dict)
    stage: int | None = None
    offload: str | None = None
    activation_checkpointing: str | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None
    micro_batches: int | None = None
    sequence_parallel: bool | None = None
    loss_parallel: bool | None = None
    micro_batch_size: int | None = None
    accumulation: int | None = None

    def allow_axis(self, axis: str, size: int) -> bool:
        """Return whether an axis may have this size."""
        return self.axes.get(axis, size) == size

    def allow_layout(self, layout: Any, stage: int) -> bool:
        """Return whether a closed layout may be chosen with this stage of ZeRO."""
        fitting = all(getattr(layout, axis) == size for axis, size in self.axes.items())
        return fitting and self.stage in (None, stage)

    def allow_work(self, work: Any) -> bool:
        """Return whether this execution of a step is allowed."""
        reads = work.micro_batch * work.parts
        wanted = [
            (self.micro_batch_size, reads),
            (self.accumulation, work.rounds),
            (self.offload, work.offload),
            *([(self.micro_batches, work.parts), (self.schedule, work.schedule)] if work.has_pipeline else []),
            *([(self.stages_per_rank, work.stages_per_rank)] if work.has_pipeline else []),
        ]
        return all(want is None or want == has for want, has in wanted)

    def allowed(self, name: str, choices: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the allowed choices of an argument."""
        want = getattr(self, name)
        return tuple(choice for choice in choices if want is None or want == choice)
