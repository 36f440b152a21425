"""The order in which a rank of a pipeline runs its passes: that of torch's schedules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from trainwright.strategies.pipeline.schedules import CHOICES, ranks_of_stages, stages_of_rank

FORWARD, BACKWARD = "FORWARD", "FULL_BACKWARD"
INPUTS, WEIGHTS = "BACKWARD_INPUT", "BACKWARD_WEIGHT"
"""Kinds of :class:`Action`, by torch's names. The last two are a backward in two parts, those of a zero bubble."""


class Action(NamedTuple):
    """A pass of one micro-batch through one stage.

    Args:
        kind: torch's name of it.
        stage: which.
        part: index of the micro-batch.
    """

    kind: str
    stage: int
    part: int


@lru_cache(maxsize=1024)
def actions_of(schedule: str, pipeline: int, stages_per_rank: int, parts: int, rank: int) -> tuple[Action, ...]:
    """The passes of a rank, in order.

    Args:
        schedule: name of the schedule.
        pipeline: ranks.
        stages_per_rank: stages of each.
        parts: micro-batches.
        rank: place along the pipeline.
    """
    if schedule in ("gpipe", "1f1b"):
        ahead = parts if schedule == "gpipe" else min(parts, pipeline - rank)
        found = [Action(FORWARD, rank, part) for part in range(ahead)]
        for part in range(parts):
            found.append(Action(BACKWARD, rank, part))
            found += [Action(FORWARD, rank, ahead + part)] if ahead + part < parts else []
        return tuple(found)
    stages = pipeline * stages_per_rank
    mine = stages_of_rank(rank, pipeline, stages, schedule)
    stubs = [_StageStub(index, rank, pipeline, stages, schedule) for index in mine]
    kind_of_schedule: Any = CHOICES[schedule].load()
    built = kind_of_schedule(stubs, n_microbatches=parts, loss_fn=lambda output, target: output)
    return tuple(
        Action(each.computation_type.name, each.stage_index, each.microbatch_index)
        for action in built.pipeline_order[rank]
        for each in ((action and action.sub_actions) or (action,))
        if each is not None and each.computation_type.name in (FORWARD, BACKWARD, INPUTS, WEIGHTS)
    )


def until_fullest(actions: Sequence[Action]) -> Sequence[Action]:
    """Of forwards and full backwards the first, up to a backward at which a rank holds as much as at any later one.

    It is the first backward that finds gradients of as many stages as any, and then as many passes as any of these.
    """
    most, end, live = (-1, -1), 0, 0
    graded: set[int] = set()
    for index, action in enumerate(actions):
        if action.kind == FORWARD:
            live += 1
            continue
        if (len(graded), live) > most:
            most, end = (len(graded), live), index + 1
        graded.add(action.stage)
        live -= 1
    return actions[:end]


class _StageStub:
    """What torch's schedules read of a stage while they lay out its order."""

    has_backward = True
    is_first = is_last = False

    def __init__(self, index: int, rank: int, ranks: int, stages: int, schedule: str) -> None:
        self.stage_index, self.group_rank, self.group_size, self.num_stages = index, rank, ranks, stages
        self.stage_index_to_group_rank = dict(enumerate(ranks_of_stages(ranks, stages, schedule)))
        self.device, self.group = torch.device("cpu"), None
        self.submod = torch.nn.Identity()
