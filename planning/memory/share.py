"""Parts of the model on a rank of a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from trainwright.strategies.pipeline.schedules import stages_of_rank


@dataclass(frozen=True)
class StageShare:
    """Parts of the model on a rank.

    Args:
        stages: for each stage, the number of blocks of each kind.
        has_first, has_last: whether it has the parts before and after the blocks.
        place: rank along the pipeline.
    """

    stages: tuple[tuple[tuple[int, int], ...], ...]
    has_first: bool
    has_last: bool
    place: int = 0

    @cached_property
    def blocks(self) -> dict[int, int]:
        """Kind -> number of blocks."""
        found = Counter[int]()
        for stage in self.stages:
            found.update(dict(stage))
        return found


def share_of(kinds: Sequence[int], spans: Sequence[range], pipeline: int, schedule: str, rank: int) -> StageShare:
    """Return the parts of the model on rank ``rank`` of a pipeline.

    Args:
        kinds: of all blocks, in order.
        spans: blocks of each stage.
        pipeline: number of ranks.
        schedule: its name.
        rank: along the pipeline.
    """
    mine = stages_of_rank(rank, pipeline, len(spans), schedule) if pipeline > 1 else [0]
    counts = (Counter(kinds[index] for index in spans[stage]) for stage in mine)
    return StageShare(tuple(tuple(sorted(each.items())) for each in counts), 0 in mine, len(spans) - 1 in mine, rank)
