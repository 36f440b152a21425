"""Bytes that a rank needs under a layout, at the moment of a step at which it needs most.

What a rank holds of parameters, gradients and optimizer follows the rules of the strategies, as in
:mod:`trainwright.trainer.layout_report`; what it keeps for backward was measured
(:mod:`~trainwright.trainer.planning.facts`); how much of both there is at a time follows from the order of a step.
docs/planning.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule

from trainwright.strategies.layout import Layout
from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.schedules import stages_of_rank
from trainwright.strategies.plan import ModelPlan
from trainwright.strategies.tensor_rules import plan_splits
from trainwright.trainer.layout_report import OptimizerStates
from trainwright.trainer.planning.facts import ModelFacts, Part, Pass
from trainwright.trainer.planning.order import BACKWARD, FORWARD, INPUTS, WEIGHTS, actions_of

# Of torch's DistributedDataParallel, and of ZeRO's buckets (strategy.bucket_mib).
_BUCKET = 25 * 2**20
_LEAST_BUCKETS, _SMALL_BUCKET = 16, 2**20
# Packed buckets of gradients at once, see strategies/reducer.py.
_IN_FLIGHT = 2
# Schedules whose backwards come in an order for which there is no formula here.
_SIMULATED = ("interleaved_zero_bubble", "zbv", "dualpipev")

FIRST, LAST, BOTH = "first", "last", "both"
Unit = int | str
"""A kind of block, or parameters outside of the blocks: used before them, after them, or in both places (tied)."""


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
        prefetch: blocks that stage 3 gathers ahead; None: as FSDP2 does.
        reshard: whether stage 3 lets go of a block's parameters after its forward; never in a pipeline.
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
        cuts = self.layout.pipeline * self.layout.context * self.layout.tensor * self.layout.expert > 1
        return self.stage == 3 and (self.layout.replicate * self.layout.state_ranks > 1 or not cuts)


@dataclass(frozen=True)
class UnitState:
    """Bytes that the parameters of a unit take on a rank.

    Args:
        kept: parameters between steps.
        whole: parameters before ZeRO splits them.
        gradients: averaged.
        whole_gradients: before they are averaged and split.
        optimizer: state.
        stepped: what the optimizer steps.
        largest: of the whole parameters, the largest.
        numel: elements that are trained, before ZeRO splits them.
        tensors: parameters.
        reduced: of the whole gradients, those that other ranks of the state's axes have too.
    """

    kept: float = 0.0
    whole: float = 0.0
    gradients: float = 0.0
    whole_gradients: float = 0.0
    optimizer: float = 0.0
    stepped: float = 0.0
    largest: float = 0.0
    numel: float = 0.0
    tensors: float = 0.0
    reduced: float = 0.0

    def __add__(self, other: UnitState) -> UnitState:
        return UnitState(
            self.kept + other.kept,
            self.whole + other.whole,
            self.gradients + other.gradients,
            self.whole_gradients + other.whole_gradients,
            self.optimizer + other.optimizer,
            self.stepped + other.stepped,
            max(self.largest, other.largest),
            self.numel + other.numel,
            self.tensors + other.tensors,
            self.reduced + other.reduced,
        )

    def times(self, count: float) -> UnitState:
        """Of so many equal units."""
        if not count:
            return UnitState()
        return UnitState(
            self.kept * count,
            self.whole * count,
            self.gradients * count,
            self.whole_gradients * count,
            self.optimizer * count,
            self.stepped * count,
            self.largest,
            self.numel * count,
            self.tensors * count,
            self.reduced * count,
        )


@dataclass(frozen=True)
class _Weight:
    shape: tuple[int, ...]
    itemsize: int
    is_trained: bool
    is_expert: bool
    dim: int | None
    dtype: torch.dtype
    name: str


class StateTable:
    """What the parameters of a module weigh on a rank, unit by unit.

    Args:
        facts: of the module.
        plans: gives the plan of ``small`` for a size of the tensor axis.
        small: the module with a few of its blocks, see :meth:`ModelFacts.reduced`.
        halves: whether floating-point weights become bf16 (``precision=bf16-true``).
    """

    def __init__(
        self, facts: ModelFacts, plans: Callable[[int], ModelPlan], small: LightningModule, halves: bool = False
    ) -> None:
        self.facts, self._plans, self._small, self._halves = facts, plans, small, halves
        self.states = OptimizerStates(facts.module)
        self._weights: dict[int, dict[Unit, list[_Weight]]] = {}
        self._linear: dict[tuple[str, torch.dtype], tuple[float, float] | None] = {}
        self.state_of = cache(self._state_of)
        self.of_share = cache(self._of_share)

    @property
    def units(self) -> tuple[Unit, ...]:
        """All units that have parameters."""
        return tuple(self._units(1))

    def _units(self, tensor: int) -> dict[Unit, list[_Weight]]:
        if tensor not in self._weights:
            self._weights[tensor] = self._sorted(tensor)
        return self._weights[tensor]

    def _sorted(self, tensor: int) -> dict[Unit, list[_Weight]]:
        module, blocks = self.facts.module, self.facts.blocks
        plan = self._plans(tensor)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        aliases = {alias: names[id(p)] for alias, p in module.named_parameters(remove_duplicate=False)}
        dims = {aliases[a]: split.dim for a, split in plan_splits(module, plan).items()} if tensor > 1 else {}
        sides = _sides(self._small, plan)
        seen: dict[int, str] = {}  # kind -> the block that stands for all
        for name, kind in zip(blocks, self.facts.kinds, strict=True):
            seen.setdefault(kind, name)
        prefixes = {f"{name}.": kind for kind, name in seen.items()}
        others = [f"{name}." for name in blocks if name not in seen.values()]
        found: dict[Unit, list[_Weight]] = {}
        for name, parameter in module.named_parameters():
            if name.startswith(tuple(others)) and others:
                continue
            unit: Unit = next(
                (kind for prefix, kind in prefixes.items() if name.startswith(prefix)), sides.get(name, BOTH)
            )
            is_float = parameter.is_floating_point()
            dtype = torch.bfloat16 if self._halves and is_float else parameter.dtype
            is_expert = any(name.startswith(f"{expert}.") for expert in plan.experts)
            weight = _Weight(
                tuple(parameter.shape), dtype.itemsize, parameter.requires_grad, is_expert, dims.get(name), dtype, name
            )
            found.setdefault(unit, []).append(weight)
        return found

    def _state_of(
        self, unit: Unit, tensor: int, expert: int, ranks: int, stage: int, splits: bool, alone: bool
    ) -> UnitState:
        """Bytes of a unit on the rank that holds most.

        Args:
            unit: kind of block or place outside.
            tensor, expert: sizes of these axes.
            ranks: that share a copy of the state.
            stage: of ZeRO.
            splits: whether parameters are split, see :attr:`Work.splits_parameters`.
            alone: whether no other rank trains the same parameters, in a layout that cuts the module.
        """
        total = UnitState()
        for weight in self._units(tensor).get(unit, ()):
            total = total + self._weigh(weight, tensor, expert, ranks, stage, splits, alone)
        return total

    def _of_share(
        self, share: Share, tensor: int, expert: int, ranks: int, stage: int, splits: bool, alone: bool
    ) -> tuple[UnitState, UnitState, UnitState]:
        """See :func:`state_of`."""

        def each(unit: Unit) -> UnitState:
            return self.state_of(unit, tensor, expert, ranks, stage, splits, alone)

        blocks = _sum(each(kind).times(count) for kind, count in share.blocks.items())
        heaviest = max((each(kind) for kind in share.blocks), key=lambda state: state.whole, default=UnitState())
        outside = [each(FIRST)] if share.has_first else []
        outside += [each(LAST)] if share.has_last else []
        outside += [each(BOTH)] if share.has_first or share.has_last else []
        return blocks, heaviest, _sum(outside)

    def _weigh(
        self, weight: _Weight, tensor: int, expert: int, ranks: int, stage: int, splits: bool, alone: bool
    ) -> UnitState:
        shape = list(weight.shape)
        if weight.dim is not None:
            shape[weight.dim] //= tensor
        if weight.is_expert and expert > 1:
            shape[0] //= expert
            ranks //= expert
        whole = math.prod(shape) * weight.itemsize
        chunk, mine = whole, math.prod(shape)
        if stage and shape and not (alone and ranks == 1 and not splits):
            rows = -(-shape[0] // ranks)
            chunk = rows * math.prod(shape[1:]) * weight.itemsize
            mine = min(rows, shape[0]) * math.prod(shape[1:])
        trained = 1 if weight.is_trained else 0
        return UnitState(
            kept=chunk if splits and shape else whole,
            whole=whole,
            gradients=trained * chunk,
            whole_gradients=trained * whole,
            optimizer=self._optimizer(weight, mine) if trained else 0.0,
            stepped=trained * mine * weight.itemsize,
            largest=whole,
            numel=trained * math.prod(shape),
            tensors=1,
            reduced=trained * whole if ranks > 1 or not weight.is_expert else 0.0,
        )

    def _optimizer(self, weight: _Weight, numel: int) -> float:
        """Bytes of state; in the number of elements, which is exact for optimizers that work element by element."""
        parameter = self.facts.module.get_parameter(weight.name)
        key = (weight.name, weight.dtype)
        if key not in self._linear:
            sizes = [self.states.bytes_of(parameter, (n, 8), weight.dtype) for n in (8, 16)]
            if sizes[0] is None or sizes[1] is None:
                self._linear[key] = None
            else:
                slope = (sizes[1] - sizes[0]) / 64
                self._linear[key] = (sizes[0] - 64 * slope, slope)
        linear = self._linear[key]
        # Without an optimizer that can be asked, Adam's two numbers are the cautious guess.
        return 8.0 * numel if linear is None else linear[0] + linear[1] * numel


def _sides(module: LightningModule, plan: ModelPlan) -> dict[str, str]:
    """For parameters outside of the blocks: whether they are used before the blocks, after them, or in both places."""
    if len(plan.blocks) < 2:
        return {}
    spans = [range(1), range(1, len(plan.blocks))]
    try:
        holders = PipelineCut(module, plan, spans, []).holders
    except ValueError:  # nothing tells; no pipeline is possible then, and the place does not matter
        return {}
    return {name: BOTH if len(at) > 1 else (FIRST, LAST)[at[0]] for name, at in holders.items()}


# ---------------------------------------------------------------------------------------------------------------------
# A pipeline


@dataclass(frozen=True)
class Share:
    """What a rank has of the model: the units of its stages.

    Args:
        stages: for each stage, how many blocks of each kind.
        has_first, has_last: whether it holds what stands before and after the blocks.
        place: along the pipeline.
    """

    stages: tuple[tuple[tuple[int, int], ...], ...]
    has_first: bool
    has_last: bool
    place: int = 0

    @cached_property
    def blocks(self) -> dict[int, int]:
        """Kind -> how many."""
        found: dict[int, int] = {}
        for stage in self.stages:
            for kind, count in stage:
                found[kind] = found.get(kind, 0) + count
        return found


def share_of(kinds: Sequence[int], spans: Sequence[range], pipeline: int, schedule: str, rank: int) -> Share:
    """What rank ``rank`` of a pipeline has.

    Args:
        kinds: of all blocks, in order.
        spans: blocks of each stage.
        pipeline: ranks.
        schedule: its name.
        rank: place along the pipeline.
    """
    mine = stages_of_rank(rank, pipeline, len(spans), schedule) if pipeline > 1 else [0]
    counted = []
    for stage in mine:
        counts: dict[int, int] = {}
        for index in spans[stage]:
            counts[kinds[index]] = counts.get(kinds[index], 0) + 1
        counted.append(tuple(sorted(counts.items())))
    return Share(tuple(counted), 0 in mine, len(spans) - 1 in mine, rank)


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
    return _simulated(schedule, pipeline, stages_per_rank, parts, rank)


def _simulated(schedule: str, pipeline: int, stages_per_rank: int, parts: int, rank: int) -> float:
    """The most of :func:`passes_of`."""
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


# ---------------------------------------------------------------------------------------------------------------------
# A rank


def held_by(table: StateTable, cost: Pass, work: Work, share: Share, live: float) -> Held:
    """What a rank holds at the moment at which it holds most.

    Args:
        table: of the module's parameters.
        cost: of a pass, cut as the layout cuts it.
        work: layout and step.
        share: what the rank has of the model.
        live: passes of one of its stages whose activations are held at once, see :func:`in_flight`.
    """
    found = moments(table, cost, work, share, live)
    return replace(max(found, key=lambda held: held.total), host=max(held.host for held in found))


def state_of(table: StateTable, work: Work, share: Share) -> tuple[UnitState, UnitState, UnitState]:
    """What the parameters of a rank weigh: its blocks, the heaviest block, and what is outside of them."""
    layout = work.layout
    alone = layout.pipeline * layout.context * layout.tensor * layout.expert > 1 and layout.replicate == 1
    return table.of_share(
        share, layout.tensor, layout.expert, layout.state_ranks, work.stage, work.splits_parameters, alone
    )


def bucket_bytes(work: Work, whole: float) -> float:
    """Of ZeRO's reducer for so many bytes of parameters: a small part of a small model, see strategies/zero.py."""
    return min(work.bucket_bytes, max(whole / _LEAST_BUCKETS, _SMALL_BUCKET))


def _sum(states: Iterable[UnitState]) -> UnitState:
    total = UnitState()
    for state in states:
        total = total + state
    return total


def moments(table: StateTable, cost: Pass, work: Work, share: Share, live: float) -> list[Held]:
    """What a rank holds at each moment of a step that may be the one at which it holds most."""
    blocks, heaviest, outside = state_of(table, work, share)
    state = blocks + outside
    rest = _at_rest(work, state)
    kept = _Kept(cost, work, share)
    averaged = 0.0 if work.offload != "none" else state.gradients
    buffers = _Buffers(work, blocks, heaviest, outside)
    if work.has_pipeline:
        return _moments_of_pipeline(rest, kept, buffers, work, share, state, averaged, live)
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
        _stepping(rest, averaged, state, work),
    ]


def _moments_of_pipeline(
    rest: Held,
    kept: _Kept,
    buffers: _Buffers,
    work: Work,
    share: Share,
    state: UnitState,
    averaged: float,
    live: float,
) -> list[Held]:
    """Before the first backward there are no gradients yet, afterwards whole ones until all passes are done."""
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
        _stepping(rest, averaged, state, work),
    ]


def _first_backward(rest: Held, kept: _Kept, buffers: _Buffers, persisting: float, live: float, is_whole: bool) -> Held:
    """The first of a round: whole gradients are there if those of earlier rounds were left whole."""
    held = buffers.whole_step if is_whole else buffers.gathered_whole
    activations = kept.pipeline(live, is_accumulating=is_whole)
    return replace(rest, gradients=persisting, activations=activations, buffers=held, moment="first backward")


def _first_of_stage(
    at: AtBackward, rest: Held, kept: _Kept, buffers: _Buffers, persisting: float, stages: int
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


def _stepping(rest: Held, gradients: float, state: UnitState, work: Work) -> Held:
    """Optimizers compute with a number or two for each that they step: tensor by tensor, or all at once (foreach)."""
    return replace(rest, gradients=gradients, buffers=min(state.largest, state.stepped), moment="optimizer step")


class _Kept:
    """Activations of a rank at the moments of a step."""

    def __init__(self, cost: Pass, work: Work, share: Share) -> None:
        self._cost, self._samples, self._share = cost, work.micro_batch, share

    def _of(self, part: Part) -> float:
        return part.kept.of(self._samples)

    @property
    def _through(self) -> float:
        """What is kept before the blocks and in them."""
        inside = sum(count * self._of(self._cost.blocks[kind]) for kind, count in self._share.blocks.items())
        return inside + self._of(self._cost.before)

    def forward(self) -> float:
        return self._through + self._of(self._cost.after) + self._cost.forward_peak.of(self._samples)

    def head(self) -> float:
        return self._through + self._of(self._cost.after) + self._cost.head_peak.of(self._samples)

    def block(self) -> float:
        cost = self._cost
        return self._through + cost.entry.of(self._samples) + cost.block_peak.of(self._samples)

    def reduced(self) -> float:
        """When the last block has gone backward and its activations are gone, within the backward of the next."""
        return self.block() - self.heaviest_block

    def blocks(self, ahead: float = 0.0) -> float:
        """Within the forward of the last block, or of that which is followed by so many."""
        most = max((self._of(block) for block in self._cost.blocks), default=0.0)
        return self._through - ahead * most + self._cost.forward_block.of(self._samples)

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


class _Buffers:
    """Gathered parameters, whole gradients and buckets of a rank at the moments of a step."""

    def __init__(self, work: Work, blocks: UnitState, heaviest: UnitState, outside: UnitState) -> None:
        self._work, self._blocks, self._heaviest, self._outside = work, blocks, heaviest, outside
        state = blocks + outside
        self._state = state
        self._is_gathered = work.splits_parameters
        layout = work.layout
        self._is_reduced = work.stage in (1, 2) or (work.stage == 3 and not self._is_gathered)
        self.is_alone = layout.replicate * layout.state_ranks == 1
        self._bucket = min(bucket_bytes(work, state.whole), state.reduced)

    def persisting(self, averaged: float, whole: float) -> float:
        """Gradients that are there when the last backward begins."""
        work = self._work
        if work.stage == 0:
            is_ddp = work.layout.replicate > 1
            return whole if is_ddp or work.rounds > 1 else 0.0
        if work.rounds == 1:
            # ZeRO's own averaging shows shards on the parameters, until backward makes the next gradient of each.
            return averaged if self._is_reduced and not self.is_alone and work.offload == "none" else 0.0
        return whole if work.stage == 1 or work.no_sync else averaged

    @property
    def _beside_buckets(self) -> float:
        """Under DDP, gradients of earlier micro-batches, which are not in the buckets."""
        work = self._work
        return self._state.whole_gradients if work.stage == 0 and work.layout.replicate > 1 and work.rounds > 1 else 0.0

    @property
    def in_forward(self) -> float:
        return self._gathered(1.0) + self._beside_buckets

    @property
    def in_last_block(self) -> float:
        """FSDP2 keeps what a block was gathered into, beside its parameters, until the next one is gathered."""
        return self._gathered(1.0 if self._work.prefetch == 0 else 2.0) + self._beside_buckets

    @property
    def in_head(self) -> float:
        return self._gathered(0.0) + self._beside_buckets

    @property
    def in_block(self) -> float:
        """When backward has entered the last block: gradients of what follows it are there."""
        if self._is_gathered:
            return self._gathered(1.0 + self.ahead) + self._outside.whole_gradients / 2  # this block's and the next's
        if self._is_reduced and not self.is_alone:
            return self._on_their_way(self._outside.reduced)
        return self._beside_buckets

    def _on_their_way(self, made: float) -> float:
        """Of the ZeRO reducer, when backward has made gradients of so many bytes.

        Those of a bucket stay until all of it are there and it is packed; packed buckets and what is left of them go
        on their way, a few at a time. Shards of a first micro-batch take the place of those of the step before.
        """
        work, size = self._work, self._bucket
        is_there = work.rounds > 1 and (work.stage == 1 or work.no_sync)  # added to whole ones of earlier passes
        unpacked = 0.0 if is_there else min(made, size)
        if not size or made < size:
            return unpacked
        buckets = min(_IN_FLIGHT, made // size)
        rows = buckets * size / work.layout.state_ranks if work.rounds > 1 else 0.0
        return unpacked + buckets * size + rows

    @property
    def in_first(self) -> float:
        """Within the backward of the first block: the others have their gradients."""
        others = self._state.whole_gradients - self._heaviest.whole_gradients
        if self._is_gathered:
            return self._gathered(1.0)
        if self._is_reduced and not self.is_alone:
            return self._on_their_way(self._state.reduced - self._heaviest.reduced)
        has_none = not self._beside_buckets and not self.persisting(0.0, self._state.whole_gradients)
        return others if has_none else self._beside_buckets

    @property
    def reducing(self) -> float:
        """While gradients of the block before are on their way: a copy of them, beside what :attr:`in_block` counts."""
        if self._is_gathered:
            return self.in_block + self._heaviest.whole_gradients
        if self._is_reduced and not self.is_alone:
            return self._on_their_way(self._outside.reduced + self._heaviest.reduced)
        return self._beside_buckets

    @property
    def ahead(self) -> float:
        """Blocks that are gathered while another computes, of those that there are beside it."""
        asked = 1.0 if self._work.prefetch is None else float(self._work.prefetch)
        others = self._blocks.whole / self._heaviest.whole - 1 if self._heaviest.whole else 0.0
        return min(asked, max(others, 0.0))

    @property
    def in_middle_block(self) -> float:
        """Within the forward of the last block that others are gathered ahead of."""
        return self._gathered(1.0 + self.ahead) + self._beside_buckets

    def _gathered(self, blocks: float) -> float:
        return self._outside.whole + blocks * self._heaviest.whole if self._is_gathered else 0.0

    @property
    def gathered_whole(self) -> float:
        """In a pipeline: what is gathered once for all passes."""
        return self._state.whole if self._is_gathered else 0.0

    def whole_of_stages(self, part: float) -> float:
        """In a pipeline: that, and whole gradients of a part of the rank's stages."""
        return self.gathered_whole + part * self._state.whole_gradients

    @property
    def whole_of_block(self) -> float:
        """Whole gradients of the heaviest block."""
        return self._heaviest.whole_gradients

    @property
    def whole_step(self) -> float:
        """In a pipeline, when all stages have gone backward."""
        return self.whole_of_stages(1.0)

    @property
    def at_end(self) -> float:
        if self._work.has_pipeline:
            sent = self._heaviest.whole_gradients
            if self._is_reduced and self._bucket:
                # The gradients of a bucket are packed, and shards are left of those that are on their way.
                buckets = min(_IN_FLIGHT, self._state.reduced // self._bucket)
                sent = self._bucket * (1 + buckets / self._work.layout.state_ranks)
            return self.whole_step + (0.0 if self.is_alone else sent)
        if self._is_gathered:
            return self._outside.whole + self._outside.whole_gradients + self._heaviest.whole_gradients
        if self._is_reduced and not self.is_alone:
            return self._on_their_way(self._state.reduced)
        return self._beside_buckets


__all__: Sequence[str] = (
    "Held", "Share", "StateTable", "UnitState", "Work", "bucket_bytes", "held_by", "in_flight", "moments", "share_of",
    "state_of",
)  # fmt: skip
