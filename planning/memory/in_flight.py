"""The passes of a pipeline's rank, in the order of torch's schedules, and whose activations are held at once."""

from __future__ import annotations

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


class _StageStub:
    """What torch's schedules read of a stage while they lay out its order."""

    has_backward = True
    is_first = is_last = False

    def __init__(self, index: int, rank: int, ranks: int, stages: int, schedule: str) -> None:
        self.stage_index, self.group_rank, self.group_size, self.num_stages = index, rank, ranks, stages
        self.stage_index_to_group_rank = dict(enumerate(ranks_of_stages(ranks, stages, schedule)))
        self.device, self.group = torch.device("cpu"), None
        self.submod = torch.nn.Identity()


@lru_cache(maxsize=4096)
def in_flight(schedule: str, pipeline: int, stages_per_rank: int, parts: int, rank: int) -> float:
    """Micro-batches whose activations a rank holds at once, at most, in passes of one of its stages.

    Args:
        schedule: name of the schedule.
        pipeline: ranks.
        stages_per_rank: stages of each.
        parts: micro-batches.
        rank: place along the pipeline.
    """
    if pipeline == 1:
        return 1
    if schedule == "1f1b":
        return min(parts, pipeline - rank)
    if schedule in ("gpipe", "looped_bfs"):
        return parts * stages_per_rank
    if schedule == "interleaved_1f1b":
        # Torch's schedule (and Megatron's, arXiv:2104.04473, section 2.2).
        per_round = parts // max(1, parts // pipeline)
        return min(parts * stages_per_rank, (stages_per_rank - 1) * per_round + 2 * (pipeline - 1 - rank) + 1)
    return max(each.live for each in passes_of(schedule, pipeline, stages_per_rank, parts, rank))


class AtBackward(NamedTuple):
    """What a rank of a pipeline holds at one of its backwards.

    Args:
        live: passes whose activations are held.
        deferred: of these, such that have gone backward but for the gradients of weights.
        graded: stages that have gradients of weights.
        is_first: whether it is the first backward of its stage, which makes these as it goes on.
    """

    live: int
    deferred: int
    graded: int
    is_first: bool = False


@lru_cache(maxsize=1024)
def passes_of(schedule: str, pipeline: int, stages_per_rank: int, parts: int, rank: int) -> tuple[AtBackward, ...]:
    """What a rank holds at its backwards, by going through the order in which torch runs its passes.

    Args:
        schedule: name of a schedule of several stages a rank.
        pipeline: ranks.
        stages_per_rank: stages of each.
        parts: micro-batches.
        rank: place along the pipeline.

    Returns:
        Those of its backwards that others do not exceed in all three counts. The first of a stage counts when it
        begins: with its pass, without its gradients.
    """
    live: set[tuple[int, int]] = set()
    deferred: set[tuple[int, int]] = set()
    graded: set[int] = set()
    found: set[AtBackward] = set()
    for kind, stage, part in actions_of(schedule, pipeline, stages_per_rank, parts, rank):
        at = (stage, part)
        if kind == FORWARD:
            live.add(at)
            continue
        is_first = kind == BACKWARD and stage not in graded
        if kind == WEIGHTS:
            graded.add(stage)
        found.add(AtBackward(len(live), len(deferred), len(graded), is_first))
        if kind == BACKWARD:
            graded.add(stage)
        if kind == INPUTS:
            deferred.add(at)
        else:
            live.discard(at)
            deferred.discard(at)
    return tuple(sorted(a for a in found if not any(_exceeds(b, a) for b in found)))


def _exceeds(one: AtBackward, other: AtBackward) -> bool:
    more = all(a >= b for a, b in zip(one[:3], other[:3], strict=True))
    return one != other and more and one.is_first == other.is_first
