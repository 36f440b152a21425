"""Seconds of an optimizer step under a layout: computing, waiting for other stages, and waiting for communication.

Arithmetic alone, from what was measured of the module without memory and from the profile of a device. The formulas,
their sources and what is left out are in docs/planning.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainwright.core.device_profiles import DeviceProfile
from trainwright.core.layout import Layout
from trainwright.planning.memory.share import StageShare, share_of
from trainwright.planning.memory.state import StateTable, UnitState, state_of
from trainwright.planning.search.work import Work
from trainwright.planning.time.cost import ModelPart, PassCost
from trainwright.strategies.contract.communication.advice import MeasuredLink, overlapped
from trainwright.strategies.contract.communication.costs import least_bytes
from trainwright.strategies.pipeline.schedules import CHOICES

_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "send": 0}
# Of the seconds that a collective is hidden behind computing, the part by which the two slow each other down: mean
# slowdown of computing (18.9 %) of
# "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning" (arXiv:2507.03114).
_INTERFERENCE = 0.19
# Schedules whose sends torch waits for right away; the others run while the next micro-batch computes.
_WAITS_FOR_SENDS = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Traffic:
    """What one axis costs a rank in an optimizer step.

    Args:
        bytes: that it sends.
        seconds: that sending takes.
        exposed: seconds of these that nothing is computed in.
    """

    bytes: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes + other.bytes, self.seconds + other.seconds, self.exposed + other.exposed)


@dataclass(frozen=True)
class PredictedStepTime:
    """Predicted seconds of one optimizer step.

    Args:
        compute: forward and backward of all micro-batches on the rank that has most to do.
        bubble: waiting for other stages of the pipeline.
        optimizer: the update itself.
        traffic: axis -> what it sends, and how much of that a step waits for.
        flops: operations of the module itself for one step on all ranks, recomputation left out.
    """

    compute: float
    bubble: float
    optimizer: float
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    flops: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds of waiting for communication."""
        return sum(each.exposed for each in self.traffic.values())

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.bubble + self.optimizer + self.exposed


def link_of(profile: DeviceProfile, layout: Layout, axis: str) -> MeasuredLink:
    """What the ranks along an axis have between them.

    Neighbouring ranks share a node. A group of which a node holds k ranks sends over k network cards at once, which a
    ring within the node feeds; messages within and across nodes have latencies of their own.

    Args:
        profile: of the devices.
        layout: closed.
        axis: a name of the layout's, or ``state``: shard x context.
    """
    stride, size = _place_of(layout, axis)
    per_node = max(profile.devices_per_node, 1)
    if (size - 1) * stride < per_node or layout.world_size <= per_node:
        return MeasuredLink(axis, size, profile.within.latency, profile.within.bandwidth, profile.within.call)
    inside = min(size, max(per_node // stride, 1))
    bandwidth = min(profile.within.bandwidth, profile.across.bandwidth * inside)
    latency = ((inside - 1) * profile.within.latency + profile.across.latency) / inside
    return MeasuredLink(axis, size, latency, bandwidth, profile.across.call)


def _place_of(layout: Layout, axis: str) -> tuple[int, int]:
    """Distance of two ranks along an axis, and how many there are."""
    tensor, context, shard = layout.tensor, layout.context, layout.shard
    return {
        "tensor": (1, tensor),
        "context": (tensor, context),
        "shard": (tensor * context, shard),
        "state": (tensor, layout.state_ranks),
        "expert": (tensor, layout.expert),
        "replicate": (tensor * context * shard, layout.replicate),
        "pipeline": (tensor * context * shard * layout.replicate, layout.pipeline),
    }[axis]


def collective(link: MeasuredLink, kind: str, size: float, calls: float = 1.0) -> tuple[float, float]:
    """Bytes that a rank sends and seconds that it takes.

    All-reduces of many ranks go along a tree where that is faster than a ring: latency grows with the logarithm.

    Args:
        link: of the axis.
        kind: of collective.
        size: S of :mod:`trainwright.strategies.contract.communication.costs`, bytes of all calls together.
        calls: into which these are cut.
    """
    if link.ranks == 1:
        return 0.0, 0.0
    sent = least_bytes(kind, size, link.ranks, 1)
    seconds = link.seconds_of(sent, rounds=_ROUNDS[kind] * calls)
    if kind == "send":
        seconds += calls * link.latency
    if kind == "all_reduce":
        tree = 2 * math.log2(link.ranks) * link.latency * calls + 2 * size / link.bandwidth
        seconds = min(seconds, tree)
    seconds += calls * link.call
    return sent, seconds


def bubble_of(schedule: str, pipeline: int, stages_per_rank: int, forward: float, backward: float) -> float:
    """Seconds for which a rank of a pipeline waits for others in one round.

    Args:
        schedule: its name.
        pipeline: ranks.
        stages_per_rank: stages of each.
        forward, backward: seconds of one micro-batch in all stages of a rank.
    """
    if pipeline == 1:
        return 0.0
    choice = CHOICES[schedule]
    if choice.splits_backward:
        # Half of backward, the gradients of weights, fills most of the gap (arXiv:2401.10241, table 1).
        weights = backward / 2
        return (
            (pipeline - 1) * max(forward + backward - weights - (weights if choice.vee else 0.0), 0.0) / stages_per_rank
        )
    return (pipeline - 1) * (forward + backward) / stages_per_rank


def step_time(
    table: StateTable,
    cost: PassCost,
    work: Work,
    shares: tuple[StageShare, ...],
    profile: DeviceProfile,
    precision: str,
) -> PredictedStepTime:
    """Seconds of a step.

    Args:
        table: of the module's parameters.
        cost: of a pass, cut as the layout cuts it.
        work: layout and step.
        shares: what the ranks along the pipeline have; those that may have most to do.
        profile: of the devices.
        precision: of the group of that name.
    """
    passes = max((_Passes(cost, work, share, profile, precision) for share in shares), key=lambda each: each.seconds)
    share = passes.share
    blocks, heaviest, outside = state_of(table, work, share)
    micro_batches = work.rounds * work.parts
    reading = _reading(blocks.plus(outside), profile)
    compute = micro_batches * max(passes.seconds, reading)
    forward, backward = passes.forward, passes.backward
    bubble = work.rounds * bubble_of(work.schedule, work.layout.pipeline, work.stages_per_rank, forward, backward)
    traffic: dict[str, Traffic] = {}
    _add(traffic, _within_passes(cost, work, share, profile, micro_batches))
    _add(traffic, _of_pipeline(cost, work, profile, compute))
    _add(traffic, _of_state(work, blocks, outside, heaviest, passes, profile))
    update = _update(work, blocks.plus(outside), profile)
    if profile.share < 1 and work.has_pipeline:
        rest = update + sum(each.exposed for each in traffic.values())
        whole = share_of(table.facts.kinds, [range(len(table.facts.kinds))], 1, work.schedule, 0)
        mean = _Passes(cost, work, whole, profile, precision).seconds / work.layout.pipeline
        critical, compute = compute + bubble, micro_batches * max(mean, reading)
        bubble = idle(critical + rest, compute + rest, profile.share)
    return PredictedStepTime(compute, bubble, update, traffic, model_flops(table, cost, work))


def idle(critical: float, work: float, share: float) -> float:
    """Seconds of a step in which the part of a core that a rank has does nothing.

    Where ranks share cores, one that waits leaves its part to others: the step lasts as long as it would with a core
    for each, or as all their work lasts, whichever is longer.

    Args:
        critical: seconds of the rank of a pipeline that has most to do and of its waiting, with its part of a core.
        work: of a rank in the mean, so computed.
        share: that part, less than 1.
    """
    return max(share * critical - work, 0.0)


def model_flops(table: StateTable, cost: PassCost, work: Work) -> float:
    """Operations of forward and backward for the samples of a step on all ranks; backward counts twice forward."""
    ranks = work.layout.tensor * work.layout.context
    counts = {kind: table.facts.kinds.count(kind) for kind in set(table.facts.kinds)}
    forward = sum(count * cost.blocks[kind].flops for kind, count in counts.items())
    forward += cost.before.flops + cost.after.flops
    return 3 * forward * ranks * work.micro_batch * work.rounds * work.parts * work.layout.data_ranks


class _Passes:
    """Seconds that one micro-batch computes on a rank."""

    def __init__(self, cost: PassCost, work: Work, share: StageShare, profile: DeviceProfile, precision: str) -> None:
        self.share = share
        flops = profile.flops_at(precision)
        parts = _parts_of(cost, share)
        samples = work.micro_batch
        width = profile.memory_bandwidth
        self.forward = samples * sum(count * part.flops for part, count in parts) / flops
        self.forward += sum(count * part.moved.of(samples) for part, count in parts) / width
        self.backward = samples * sum(count * part.backward for part, count in parts) / flops
        self.backward += sum(count * part.backward_moved.of(samples) for part, count in parts) / width
        # Parameters are gathered for forward and for backward, and gradients reduced, block by block.
        gathering = (sum(share.blocks.values()) + 1) * profile.gather_seconds if work.splits_parameters else 0.0
        calls = sum(count * part.calls for part, count in parts) * profile.operation_seconds
        again = sum(count * part.backward_calls for part, count in parts) * profile.operation_seconds
        self.forward = _with_starting(self.forward, calls + gathering, profile)
        self.backward = _with_starting(self.backward, again + 2 * gathering, profile)

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def _parts_of(cost: PassCost, share: StageShare) -> list[tuple[ModelPart, int]]:
    """The parts of a pass that a rank runs, each with how often."""
    parts = [(cost.blocks[kind], count) for kind, count in share.blocks.items()]
    parts += [(cost.before, 1)] if share.has_first else []
    parts += [(cost.after, 1)] if share.has_last else []
    return parts


def _with_starting(work: float, starting: float, profile: DeviceProfile) -> float:
    """Seconds of work and of what starts it: a core does both, a GPU works while its host starts more."""
    return work + starting if profile.is_cpu else max(work, starting)


def _reading(state: UnitState, profile: DeviceProfile) -> float:
    """Least seconds of a micro-batch: weights are read twice and their gradients written once."""
    return (2 * state.whole + state.whole_gradients) / profile.memory_bandwidth


def _add(traffic: dict[str, Traffic], more: Mapping[str, Traffic]) -> None:
    for axis, each in more.items():
        traffic[axis] = traffic.get(axis, Traffic()) + each


def _within_passes(
    cost: PassCost, work: Work, share: StageShare, profile: DeviceProfile, micro_batches: int
) -> dict[str, Traffic]:
    """What blocks send along the tensor, the context and the expert axis; computing waits for all of it."""
    traffic: dict[str, Traffic] = {}
    links = {axis: link_of(profile, work.layout, axis) for axis in ("tensor", "context", "expert")}
    for part, count in _parts_of(cost, share):
        for (name, kind), sent in part.sent.items():
            axis = "expert" if name == "context-expert" else name  # where these are the same ranks
            if axis not in links:
                continue
            link, size = links[axis], sent.least * work.micro_batch
            seconds = link.seconds_of(size, rounds=_ROUNDS.get(kind, 1) * sent.calls)
            seconds += sent.calls * (link.call + (link.latency if kind == "send" else 0.0))
            times = count * micro_batches
            one = Traffic(size * times, seconds * times, seconds * times)
            traffic[axis] = traffic.get(axis, Traffic()) + one
    return traffic


def _of_pipeline(cost: PassCost, work: Work, profile: DeviceProfile, compute: float) -> dict[str, Traffic]:
    """Activations and their gradients at the borders of stages."""
    if not work.has_pipeline:
        return {}
    link = link_of(profile, work.layout, "pipeline")
    times = 2 * work.stages_per_rank * work.parts * work.rounds
    size = cost.boundary.of(work.micro_batch)
    seconds = times * (link.latency + link.call + size / link.bandwidth)
    exposed = seconds if work.schedule in _WAITS_FOR_SENDS else _waiting(seconds, times, compute)
    return {"pipeline": Traffic(times * size, seconds, exposed)}


def _waiting(seconds: float, pieces: float, window: float) -> float:
    """Seconds that a step gets longer by collectives in so many pieces, of which computing can hide some."""
    waits = overlapped(seconds, max(round(pieces), 1), window)
    return waits + _INTERFERENCE * (seconds - waits)


def _of_state(
    work: Work,
    blocks: UnitState,
    outside: UnitState,
    heaviest: UnitState,
    passes: _Passes,
    profile: DeviceProfile,
) -> dict[str, Traffic]:
    """Gradients, and parameters that are gathered, along the shard and the replicate axis."""
    layout, state = work.layout, blocks.plus(outside)
    pieces = max(round(blocks.whole / heaviest.whole), 1) + 1 if heaviest.whole else 1
    if work.stage in (0, 1, 2) or not work.splits_parameters:
        pieces = max(math.ceil(state.whole_gradients / work.bucket_bytes), 1)
    shards, copies = link_of(profile, layout, "state"), link_of(profile, layout, "replicate")
    backward, forward = passes.backward, passes.forward
    traffic: dict[str, Traffic] = {}

    def wait(axis: str, link: MeasuredLink, kind: str, size: float, times: float, window: float) -> None:
        sent, seconds = collective(link, kind, size, pieces)
        exposed = seconds if work.has_pipeline or not window else _waiting(seconds, pieces, window)
        traffic[axis] = traffic.get(axis, Traffic()) + Traffic(sent * times, seconds * times, exposed * times)

    if work.stage == 0:
        wait("replicate", copies, "all_reduce", state.whole_gradients, 1, backward)
        return traffic
    reductions = 1 if work.stage == 1 or work.no_sync else work.rounds
    wait("shard", shards, "reduce_scatter", state.whole_gradients, reductions, backward)
    if work.splits_parameters:
        # Blocks are gathered for forward and again for backward; what is outside of them once.
        wait("shard", shards, "all_gather", blocks.whole + outside.whole, work.rounds, forward)
        if not work.has_pipeline:
            wait("shard", shards, "all_gather", blocks.whole, work.rounds, backward)
        wait("replicate", copies, "all_reduce", state.gradients, 1, backward)
    else:
        wait("shard", shards, "all_gather", state.whole, 1, 0.0)
        wait("replicate", copies, "all_reduce", state.gradients, 1, 0.0)
    return {axis: each for axis, each in traffic.items() if each.seconds}


def _update(work: Work, state: UnitState, profile: DeviceProfile) -> float:
    """The optimizer reads gradients, reads and writes what it steps and its state."""
    moved = state.gradients + 2 * (state.stepped + state.optimizer)
    if work.offload == "none":
        return moved / profile.memory_bandwidth
    # Gradients go to the host and parameters come back; the host's cores work at about the speed of that link.
    return (state.gradients + state.stepped + moved) / profile.host_bandwidth
