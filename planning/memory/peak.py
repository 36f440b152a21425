"""Bytes that a rank needs under a layout, at the moment of a step at which it needs most.

What a rank holds of parameters, gradients and optimizer is in :mod:`~trainwright.planning.memory.state`, what it keeps
for backward in :class:`KeptMemory`; how much of both there is at a time follows from the
order of a step. docs/planning.md has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from trainwright.planning.memory.buffers import Buffers
from trainwright.planning.memory.share import StageShare
from trainwright.planning.memory.state import StateTable, UnitState, state_of
from trainwright.planning.search.work import Work
from trainwright.planning.time.cost import ModelPart, PassCost
from trainwright.strategies.pipeline.schedules import CHOICES, ranks_of_stages, stages_of_rank

FORWARD, BACKWARD = "FORWARD", "FULL_BACKWARD"
INPUTS, WEIGHTS = "BACKWARD_INPUT", "BACKWARD_WEIGHT"
"""Kinds of :class:`Action`, by torch's names. The last two are a backward in two parts, those of a zero bubble."""
# Schedules whose backwards come in an order for which there is no formula here.
_SIMULATED = ("interleaved_zero_bubble", "zbv", "dualpipev")

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""Kinds of bytes on a device: fields of :class:`Held`."""


@dataclass(frozen=True)
class Held:
    """Bytes on one rank at one moment.

    Args:
        parameters: as they are held between steps.
        gradients: those that are there.
        optimizer: state of the optimizers.
        activations: what forward keeps for backward, and what is computed with it at the moment.
        buffers: of collectives: gathered parameters, whole gradients before they are averaged, buckets.
        host: bytes in the memory of the host, where parts are offloaded.
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
    """What a rank holds at the moment at which it holds most.

    Args:
        table: of the module's parameters.
        cost: of a pass, cut as the layout cuts it.
        work: layout and step.
        share: what the rank has of the model.
    """
    found = moments(table, cost, work, share)
    return replace(max(found, key=lambda held: held.total), host=max(held.host for held in found))


def moments(table: StateTable, cost: PassCost, work: Work, share: StageShare) -> list[Held]:
    """What a rank holds at each moment of a step that may be the one at which it holds most.

    Args:
        table: of the module's parameters.
        cost: of a pass, cut as the layout cuts it.
        work: layout and step.
        share: what the rank has of the model.

    Returns:
        In the order of a step; the last is when the optimizer steps.
    """
    blocks, heaviest, outside = state_of(table, work, share)
    state = blocks.plus(outside)
    rest = _at_rest(work, state)
    kept = KeptMemory(cost, work, share)
    averaged = 0.0 if work.offload != "none" else state.gradients
    buffers = Buffers(work, blocks, heaviest, outside)
    if work.has_pipeline:
        return _moments_of_pipeline(rest, kept, buffers, work, share, state, averaged)
    # Gradients of the step before are dropped when the first forward of the next has run, as Lightning does.
    before = buffers.persisting(averaged, state.whole_gradients)
    forward = averaged if work.rounds == 1 else max(averaged, before)
    middle = kept.blocks(buffers.ahead), buffers.in_middle_block
    return [
        replace(rest, gradients=forward, activations=middle[0], buffers=middle[1], moment="blocks ahead"),
        replace(rest, gradients=forward, activations=kept.blocks(), buffers=buffers.in_last_block, moment="last block"),
        replace(rest, gradients=forward, activations=kept.forward(), buffers=buffers.in_forward, moment="forward"),
        replace(rest, gradients=before, activations=kept.head(), buffers=buffers.in_head, moment="loss"),
        replace(rest, gradients=before, activations=kept.block(), buffers=buffers.in_block, moment="backward"),
        replace(rest, gradients=before, activations=kept.reduced(), buffers=buffers.reducing, moment="reducing"),
        replace(rest, gradients=before, activations=kept.first(), buffers=buffers.in_first, moment="first block"),
        replace(rest, gradients=max(averaged, before), buffers=buffers.at_end, moment="averaging"),
        _stepping(rest, averaged, state),
    ]


def _moments_of_pipeline(
    rest: Held,
    kept: KeptMemory,
    buffers: Buffers,
    work: Work,
    share: StageShare,
    state: UnitState,
    averaged: float,
) -> list[Held]:
    """Before the first backward there are no gradients yet, afterwards whole ones until all passes are done."""
    live = in_flight(work.schedule, work.layout.pipeline, work.stages_per_rank, work.parts, share.place)
    # Ranks that train alone accumulate in the whole gradients themselves.
    persisting = averaged if work.rounds > 1 and work.stage != 1 and not buffers.is_alone else 0.0
    is_whole = work.rounds > 1 and (work.stage == 1 or buffers.is_alone or work.no_sync)
    # Offloaded gradients are dropped as others are, and made again when the passes are done.
    is_dropped = work.offload != "none" and work.rounds == 1
    early = replace(rest, host=rest.host - state.gradients) if is_dropped else rest
    found = [_first_backward(early, kept, buffers, persisting, live, is_whole)]
    passes, stages = work.parts * work.stages_per_rank, work.stages_per_rank
    steady: list[tuple[float, float, float]]  # passes held, of these without gradients of weights, stages with them
    if work.schedule == "looped_bfs":
        # All micro-batches go backward through one stage before the next, whose gradients are not there yet.
        steady = [(passes - n * work.parts - 1, 0, n + 1) for n in range(stages)]
    elif work.schedule in _SIMULATED:
        at = passes_of(work.schedule, work.layout.pipeline, stages, work.parts, share.place)
        steady = [each[:3] for each in at if is_whole or not each.is_first]
        for each in () if is_whole else (each for each in at if each.is_first):
            found += _first_of_stage(each, early, kept, buffers, persisting, stages)
    else:
        steady = [(live if passes > live else live - 1, 0, stages)]
    for passed, deferred, made in steady:
        activations = kept.pipeline(passed, is_accumulating=True) + kept.deferred(deferred)
        step = buffers.whole_of_stages(1.0 if is_whole else made / stages)
        found.append(replace(early, gradients=persisting, activations=activations, buffers=step, moment="pipeline"))
    return [
        *found,
        replace(rest, gradients=persisting, buffers=buffers.at_end, moment="averaging"),
        _stepping(rest, averaged, state),
    ]


def _first_backward(
    rest: Held, kept: KeptMemory, buffers: Buffers, persisting: float, live: float, is_whole: bool
) -> Held:
    """The first of a round: whole gradients are there if those of earlier rounds were left whole."""
    held = buffers.whole_step if is_whole else buffers.gathered_whole
    activations = kept.pipeline(live, is_accumulating=is_whole)
    return replace(rest, gradients=persisting, activations=activations, buffers=held, moment="first backward")


def _first_of_stage(
    at: AtBackward, rest: Held, kept: KeptMemory, buffers: Buffers, persisting: float, stages: int
) -> list[Held]:
    """When the first backward of a stage begins, and within its last block, when the gradients of all others are there.

    Activations of a block are gone when its gradients are there; in between there is something of both.
    """
    begins = kept.pipeline(at.live) + kept.deferred(at.deferred)
    ends = kept.pipeline(at.live - 1) + kept.heaviest_block + kept.deferred(at.deferred)
    others = buffers.whole_of_stages((at.graded + 1) / stages) - buffers.whole_of_block
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
    """Optimizers compute with a number or two for each that they step: tensor by tensor, or all at once (foreach)."""
    return replace(rest, gradients=gradients, buffers=min(state.largest, state.stepped), moment="optimizer step")


class KeptMemory:
    """Bytes of activations of a rank at the moments of a step.

    Args:
        cost: of a pass, cut as the layout cuts it.
        work: layout and step.
        share: what the rank has of the model.
    """

    def __init__(self, cost: PassCost, work: Work, share: StageShare) -> None:
        self._cost, self._samples, self._share = cost, work.micro_batch, share

    def _of(self, part: ModelPart) -> float:
        return part.kept.of(self._samples)

    @property
    def _through(self) -> float:
        """What is kept before the blocks and in them."""
        inside = sum(count * self._of(self._cost.blocks[kind]) for kind, count in self._share.blocks.items())
        return inside + self._of(self._cost.before)

    def forward(self) -> float:
        """At the fullest moment of forward."""
        return self._through + self._of(self._cost.after) + self._cost.forward_peak.of(self._samples)

    def head(self) -> float:
        """While backward goes through what follows the blocks."""
        return self._through + self._of(self._cost.after) + self._cost.head_peak.of(self._samples)

    def block(self) -> float:
        """Within the backward of the last block."""
        cost = self._cost
        return self._through + cost.entry.of(self._samples) + cost.block_peak.of(self._samples)

    def reduced(self) -> float:
        """When the last block has gone backward and its activations are gone, within the backward of the next."""
        return self.block() - self.heaviest_block

    def blocks(self, ahead: float = 0.0) -> float:
        """Within the forward of the last block, or of that which is followed by so many."""
        return self._through - ahead * self.heaviest_block + self._cost.forward_block.of(self._samples)

    def first(self) -> float:
        """Within the backward of the first block, when those of all others are gone."""
        cost = self._cost
        return (
            self._of(cost.before)
            + self.heaviest_block
            + cost.entry.of(self._samples)
            + cost.block_peak.of(self._samples)
        )

    @property
    def heaviest_block(self) -> float:
        """What the block that keeps most keeps."""
        return max((self._of(block) for block in self._cost.blocks), default=0.0)

    def deferred(self, passes: float) -> float:
        """Passes whose gradients of weights come later: the gradient of what each layer with weights has returned."""
        kinds = self._cost.blocks
        most = max(sum(n * kinds[kind].outputs.of(self._samples) for kind, n in each) for each in self._share.stages)
        return passes * most

    def pipeline(self, live: float, is_accumulating: bool = False) -> float:
        """So many passes that are in flight, and what is computed with one of them.

        Args:
            live: passes.
            is_accumulating: whether gradients of weights are added to those of an earlier pass, one by one.
        """
        cost, share, samples = self._cost, self._share, self._samples
        stages = [sum(n * self._of(cost.blocks[kind]) for kind, n in stage) for stage in share.stages]
        heaviest = max(stages)
        boundary = cost.boundary.of(samples)
        # What a stage hands on counts with its last block; what has arrived from another one comes on top.
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
