"""Layouts of the fuzzer."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import lcm
from typing import Any

from tests.fuzz.program import Program


@dataclass(frozen=True)
class Layout:
    """A strategy with options.

    Attributes:
        strategy, options, ranks: of the Trainer.
        data_ranks: ranks that read different samples.
        weight: how often it is drawn.
    """

    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    data_ranks: int = 1
    weight: int = 2

    def parts(self, program: Program) -> int:
        """Return the number of micro-batches of a step, on all data ranks."""
        return lcm(program.accumulation, self.data_ranks)


def _pipeline(micro_batches: int, schedule: str = "1f1b", weight: int = 2) -> Layout:
    return Layout(
        "hybrid", {"pipeline": 2, "shard": 1, "micro_batches": micro_batches, "schedule": schedule}, weight=weight
    )


LAYOUTS: dict[str, Layout] = {
    "single": Layout("single", {}, 1, weight=1),
    "ddp": Layout("ddp", {}, 2, 2, weight=4),
    "zero1": Layout("zero1", {}, 2, 2),
    "zero2": Layout("zero2", {}, 2, 2),
    "zero3": Layout("zero3", {}, 2, 2, weight=4),
    "servers": Layout("parameter_server", {"servers": 2}, 2, 2),
    "tensor": Layout("hybrid", {"tensor": 2, "shard": 1}, weight=4),
    "sequence": Layout("hybrid", {"tensor": 2, "shard": 1, "sequence_parallel": True}, weight=1),
    "pipeline": _pipeline(2, weight=3),
    "gpipe": _pipeline(4, "gpipe", weight=3),
    "interleaved": _pipeline(4, "interleaved_1f1b"),
    "looped": _pipeline(4, "looped_bfs", weight=1),
    "zero_bubble": _pipeline(4, "interleaved_zero_bubble", weight=1),
    "zbv": _pipeline(4, "zbv", weight=1),
    "context": Layout("hybrid", {"context": 2, "shard": 1}, weight=2),
    "ulysses": Layout("hybrid", {"context": 2, "shard": 1, "attention": "ulysses"}, weight=1),
    "replicate_x_shard": Layout("hybrid", {"replicate": 2, "shard": 2}, 4, 4, weight=1),
    "tensor_x_shard": Layout("hybrid", {"tensor": 2, "shard": 2}, 4, 2, weight=1),
    "pipeline_x_shard": Layout("hybrid", {"pipeline": 2, "shard": 2, "micro_batches": 2}, 4, 2, weight=1),
    "pipeline_x_tensor": Layout("hybrid", {"pipeline": 2, "tensor": 2, "shard": 1, "micro_batches": 2}, 4, weight=1),
    "context_x_shard": Layout("hybrid", {"context": 2, "shard": 2}, 4, 2, weight=1),
}
