"""Peak memory of a rank under a layout, and when in a step it occurs.

Parameters, gradients and optimizer state come from :mod:`~trainwright.planning.memory.state`, activations from
:class:`KeptMemory`; the order of a step decides how much of each exists at once. Formulas: docs/planning.md.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from trainwright.planning.memory.buffers import Buffers
from trainwright.planning.memory.share import StageShare
from trainwright.planning.memory.state import StateTable, UnitState
from trainwright.planning.search.work import Work
from trainwright.planning.time.cost import ModelPart, PassCost
from trainwright.strategies.pipeline.schedules import CHOICES, ranks_of_stages, stages_of_rank

FORWARD, BACKWARD = "FORWARD", "FULL_BACKWARD"
INPUTS, WEIGHTS = "BACKWARD_INPUT", "BACKWARD_WEIGHT"
"""Kinds of :class:`Action`, by torch's names. The last two split backward, for zero-bubble schedules."""
# Schedules whose order of backwards is simulated, for want of a formula.
_SIMULATED = ("interleaved_zero_bubble", "zbv", "dualpipev")

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""Kinds of device memory: fields of :class:`Held`."""


@dataclass(frozen=True)
class Held:
    """Bytes on one rank at one moment.

    Args:
        parameters: as held between steps.
        gradients: existing gradients.
        optimizer: state of the optimizers.
        activations: kept for backward, and temporary ones.
        buffers: of collectives: gathered parameters, whole gradients before averaging, buckets.
        host: bytes of offloaded parts in host memory.
        moment: of the step.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    buffers: float = 0.0
    host: float = 0.0
    moment: str = ""

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def held_by(table: StateTable, cost: PassCost, work: Work, share: StageShare) -> Held:
    """Return the peak memory of a rank.

    Args:
        table: of the module's parameters.
        cost: of a pass, cut as the layout cuts it.
        work: layout and step.
        share: parts of the model on the rank.
    """
    found = moments(table, cost, work, share)
    return replace(max(found, key=lambda held: held.total), host=max(held.host for held in found))


def moments(table: StateTable, cost: PassCost, work: Work, share: StageShare) -> list[Held]:
    """Return the memory of a rank at each moment of a step that may be its peak.

    Args:
        table: of the module's parameters.
        cost: of a pass, cut as the layout cuts it.
        work: layout and step.
        share: parts of the model on the rank.

    Returns:
        In order of a step; the last is the optimizer's step.
    """
    blocks, heaviest, outside = table.of_share(share, work.division)
    state = blocks.plus(outside)
    rest = _at_rest(work, state)
    kept = KeptMemory(cost, work, share)
    averaged = 0.0 if work.offload != "none" else state.gradients
    buffers = Buffers(work, blocks, heaviest, outside)
    if work.has_pipeline:
        return _moments_of_pipeline(rest, kept, buffers, work, share, state, averaged)
    # Like Lightning, the first forward of a step runs before gradients of the previous one are freed.
    before = buffers.persisting(averaged, state.whole_gradients)
    forward = averaged if work.rounds == 1 else max(averaged, before)
    gradients = defaultdict(lambda: before, dict.fromkeys(("blocks ahead", "last block", "forward"), forward))
    gradients["averaging"] = max(averaged, before)
    sizes = buffers.by_moment()
    return [
        *(
            replace(rest, gradients=gradients[moment], activations=size, buffers=sizes[moment], moment=moment)
            for moment, size in kept.by_moment(buffers.ahead).items()
        ),
        _stepping(rest, averaged, state),
    ]


def _moments_of_pipeline(
    rest: Held, kept: KeptMemory, buffers: Buffers, work: Work, share: StageShare, state: UnitState, averaged: float
) -> list[Held]:
    """Return the moments of a pipeline: no gradients before the first backward, then whole ones."""
    live = in_flight(work.schedule, work.layout.pipeline, work.stages_per_rank, work.parts, share.place)
    # Ranks that train alone accumulate in whole gradients.
    persisting = averaged if work.rounds > 1 and work.stage != 1 and not buffers.is_alone else 0.0
    is_whole = work.rounds > 1 and (work.stage == 1 or buffers.is_alone or work.no_sync)
    # Offloaded gradients are freed too, and created again after the passes.
    is_dropped = work.offload != "none" and work.rounds == 1
    rest_in_passes = replace(rest, host=rest.host - state.gradients) if is_dropped else rest
    activations = kept.pipeline(live, is_accumulating=is_whole)
    held = buffers.whole_of_stages(1.0 if is_whole else 0.0)  # whole gradients if earlier rounds left them whole
    found = [
        replace(rest_in_passes, gradients=persisting, activations=activations, buffers=held, moment="first backward")
    ]
    passes, stages = work.parts * work.stages_per_rank, work.stages_per_rank
    steady: list[tuple[float, float, float]]  # passes held, those without weight gradients, stages with them
    if work.schedule == "looped_bfs":
        # Backward of all micro-batches finishes one stage before the next, which has no gradients yet.
        steady = [(passes - n * work.parts - 1, 0, n + 1) for n in range(stages)]
    elif work.schedule in _SIMULATED:
        at = passes_of(work.schedule, work.layout.pipeline, stages, work.parts, share.place)
        steady = [each[:3] for each in at if is_whole or not each.is_first]
        for each in () if is_whole else (each for each in at if each.is_first):
            found += _first_of_stage(each, rest_in_passes, kept, buffers, persisting, stages)
    else:
        steady = [(live if passes > live else live - 1, 0, stages)]
    for passed, deferred, made in steady:
        activations = kept.pipeline(passed, is_accumulating=True) + kept.deferred(deferred)
        step = buffers.whole_of_stages(1.0 if is_whole else made / stages)
        found.append(
            replace(rest_in_passes, gradients=persisting, activations=activations, buffers=step, moment="pipeline")
        )
    return [
        *found,
        replace(rest, gradients=persisting, buffers=buffers.averaging_stages(), moment="averaging"),
        _stepping(rest, averaged, state),
    ]


def _first_of_stage(
    at: AtBackward, rest: Held, kept: KeptMemory, buffers: Buffers, persisting: float, stages: int
) -> list[Held]:
    """Return two moments of a stage's first backward: its begin, and its last block with gradients of all others.

    Activations of a block are freed when its gradients exist; in between both partly exist.
    """
    begins = kept.pipeline(at.live) + kept.deferred(at.deferred)
    ends = kept.pipeline(at.live - 1) + kept.heaviest_block + kept.deferred(at.deferred)
    others = buffers.whole_of_stages((at.graded + 1) / stages) - buffers.heaviest.whole_gradients
    held = ((begins, buffers.whole_of_stages(at.graded / stages)), (ends, others))
    return [
        replace(rest, gradients=persisting, activations=activations, buffers=size, moment="first of a stage")
        for activations, size in held
    ]


def _at_rest(work: Work, state: UnitState) -> Held:
    if work.offload == "parameters":
        return Held(host=state.kept + state.gradients + state.optimizer)
    if work.offload == "optimizer":
        return Held(parameters=state.kept, host=state.stepped + state.gradients + state.optimizer)
    return Held(parameters=state.kept, optimizer=state.optimizer)


def _stepping(rest: Held, gradients: float, state: UnitState) -> Held:
    """Return the optimizer step: one or two temporaries per element, tensor by tensor or for all at once (foreach)."""
    return replace(rest, gradients=gradients, buffers=min(state.largest, state.stepped), moment="optimizer step")


class KeptMemory:
    """Activation bytes of a rank during a step.

    Args:
        cost: of a pass, cut as the layout cuts it.
        work: layout and step.
        share: parts of the model on the rank.
    """

    def __init__(self, cost: PassCost, work: Work, share: StageShare) -> None:
        self._cost, self._samples, self._share = cost, work.micro_batch, share

    def _of(self, part: ModelPart) -> float:
        return part.kept.of(self._samples)

    def by_moment(self, ahead: float) -> dict[str, float]:
        """Return the peaks of a step without a pipeline, in order.

        Args:
            ahead: number of blocks gathered ahead.
        """
        cost, samples, heaviest = self._cost, self._samples, self.heaviest_block
        inside = sum(count * self._of(cost.blocks[kind]) for kind, count in self._share.blocks.items())
        through = inside + self._of(cost.before)
        loss, block, entry = through + self._of(cost.after), cost.forward_block.of(samples), cost.entry.of(samples)
        last = through + entry + cost.block_peak.of(samples)
        return {
            "blocks ahead": through - ahead * heaviest + block,  # in forward, before the last ones
            "last block": through + block,
            "forward": loss + cost.forward_peak.of(samples),
            "loss": loss + cost.head_peak.of(samples),
            "backward": last,
            "reducing": last - heaviest,  # in the second-last block, after the last one's activations are freed
            "first block": self._of(cost.before) + heaviest + entry + cost.block_peak.of(samples),
            "averaging": 0.0,
        }

    @property
    def heaviest_block(self) -> float:
        """Largest bytes kept by a block."""
        return max((self._of(block) for block in self._cost.blocks), default=0.0)

    def deferred(self, passes: float) -> float:
        """Return the output gradients kept by passes whose weight gradients are deferred."""
        kinds = self._cost.blocks
        most = max(sum(n * kinds[kind].outputs.of(self._samples) for kind, n in each) for each in self._share.stages)
        return passes * most

    def pipeline(self, live: float, is_accumulating: bool = False) -> float:
        """Return the bytes of passes in flight, and the peak within one of them.

        Args:
            live: passes.
            is_accumulating: whether weight gradients are added one by one to those of an earlier pass.
        """
        cost, share, samples = self._cost, self._share, self._samples
        stages = [sum(n * self._of(cost.blocks[kind]) for kind, n in stage) for stage in share.stages]
        heaviest = max(stages)
        boundary = cost.boundary.of(samples)
        # A stage's output counts with its last block; received inputs are added.
        each = heaviest + (0.0 if share.has_first and len(stages) == 1 else boundary)
        total = live * each
        if share.has_first:
            total += live / len(stages) * self._of(cost.before)
        peak = cost.accumulating_peak if is_accumulating else cost.block_peak
        inside = boundary + peak.of(samples)
        if share.has_last:
            after = self._of(cost.after)
            inside = max(after + cost.head_peak.of(samples), inside)
        return total + inside


class Action(NamedTuple):
    """Pass of one micro-batch through one stage.

    Args:
        kind: torch's name.
        stage: index.
        part: index of the micro-batch.
    """

    kind: str
    stage: int
    part: int


@lru_cache(maxsize=1024)
def actions_of(schedule: str, pipeline: int, stages_per_rank: int, parts: int, rank: int) -> tuple[Action, ...]:
    """Return the passes of a rank in torch's order.

    Args:
        schedule: name of a schedule with several stages per rank.
        pipeline: number of ranks.
        stages_per_rank: stages per rank.
        parts: number of micro-batches.
        rank: along the pipeline.
    """
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
    """Attributes of a stage that torch's schedules read while they compute their order."""

    has_backward = True
    is_first = is_last = False

    def __init__(self, index: int, rank: int, ranks: int, stages: int, schedule: str) -> None:
        self.stage_index, self.group_rank, self.group_size, self.num_stages = index, rank, ranks, stages
        self.stage_index_to_group_rank = dict(enumerate(ranks_of_stages(ranks, stages, schedule)))
        self.device, self.group = torch.device("cpu"), None
        self.submod = torch.nn.Identity()


@lru_cache(maxsize=4096)
def in_flight(schedule: str, pipeline: int, stages_per_rank: int, parts: int, rank: int) -> float:
    """Return the largest number of passes of a rank's stages whose activations exist at once.

    Args:
        schedule: name of the schedule.
        pipeline: number of ranks.
        stages_per_rank: stages per rank.
        parts: number of micro-batches.
        rank: along the pipeline.
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
    """Counts of a pipeline rank at a backward.

    Args:
        live: passes whose activations exist.
        deferred: those of them whose weight gradients are deferred.
        graded: stages with weight gradients.
        is_first: whether it is the first backward of its stage.
    """

    live: int
    deferred: int
    graded: int
    is_first: bool = False


@lru_cache(maxsize=1024)
def passes_of(schedule: str, pipeline: int, stages_per_rank: int, parts: int, rank: int) -> tuple[AtBackward, ...]:
    """Simulate torch's order of passes and return the counts of a rank at its backwards.

    Args:
        schedule: name of a schedule with several stages per rank.
        pipeline: number of ranks.
        stages_per_rank: stages per rank.
        parts: number of micro-batches.
        rank: along the pipeline.

    Returns:
        Those not exceeded by another in all three counts. The first backward of a stage counts at its begin: with its
        pass, without its gradients.
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
