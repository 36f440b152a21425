"""Predicted seconds of an optimizer step: compute, pipeline bubble, and exposed communication.

Computed from the module's costs and a device profile. Formulas, sources and omissions: docs/planning.md.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from trainwright.core.device_profiles import DeviceProfile
from trainwright.core.layout import Layout
from trainwright.planning.memory.share import StageShare, share_of
from trainwright.planning.memory.state import StateTable, UnitState
from trainwright.planning.search.work import BUCKET_BYTES, Work
from trainwright.planning.time.cost import ModelPart, PassCost
from trainwright.strategies.contract.communication.advice import MeasuredLink, overlapped
from trainwright.strategies.contract.communication.costs import least_bytes
from trainwright.strategies.pipeline.schedules import CHOICES

_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "send": 0}
# Slowdown of compute during overlapped communication: mean of 18.9 % in "Characterizing Compute-Communication Overlap
# in GPU-Accelerated Distributed Deep Learning" (arXiv:2507.03114).
_INTERFERENCE = 0.19
# Schedules in which torch waits for sends immediately; others overlap them with the next micro-batch.
_WAITS_FOR_SENDS = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Traffic:
    """Communication of a rank along an axis in an optimizer step.

    Args:
        bytes: sent.
        seconds: of communication.
        exposed: seconds of these without overlapping compute.
    """

    bytes: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes + other.bytes, self.seconds + other.seconds, self.exposed + other.exposed)


@dataclass(frozen=True)
class PredictedStepTime:
    """Predicted seconds of an optimizer step.

    Args:
        compute: forward and backward of all micro-batches on the busiest rank.
        bubble: waiting for other stages of the pipeline.
        optimizer: update.
        traffic: axis -> communication.
        flops: model operations of one step on all ranks, without recomputation.
    """

    compute: float
    bubble: float
    optimizer: float
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    flops: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication."""
        return sum(each.exposed for each in self.traffic.values())

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.bubble + self.optimizer + self.exposed


def link_of(profile: DeviceProfile, layout: Layout, axis: str) -> MeasuredLink:
    """Return the link between the ranks along an axis.

    Neighboring ranks share a node. A group with k ranks on a node sends over k network cards at once, fed by a ring
    within the node; messages within and across nodes have different latencies.

    Args:
        profile: of the devices.
        layout: closed.
        axis: an axis of the layout, or ``state``: shard x context.
    """
    stride, size = _stride_and_size(layout, axis)
    per_node = max(profile.devices_per_node, 1)
    if (size - 1) * stride < per_node or layout.world_size <= per_node:
        return MeasuredLink(axis, size, profile.within.latency, profile.within.bandwidth, profile.within.call)
    inside = min(size, max(per_node // stride, 1))
    bandwidth = min(profile.within.bandwidth, profile.across.bandwidth * inside)
    latency = ((inside - 1) * profile.within.latency + profile.across.latency) / inside
    return MeasuredLink(axis, size, latency, bandwidth, profile.across.call)


def _stride_and_size(layout: Layout, axis: str) -> tuple[int, int]:
    """Return the stride of ranks along an axis, and its size."""
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
    """Return the bytes that a rank sends and the seconds of a collective.

    All-reduces of many ranks use a tree where it is faster than a ring: its latency is logarithmic.

    Args:
        link: of the axis.
        kind: of collective.
        size: S of :mod:`trainwright.strategies.contract.communication.costs`, bytes of all calls.
        calls: number of calls.
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
    """Return the seconds that a rank of a pipeline waits for others per round.

    Args:
        schedule: its name.
        pipeline: number of ranks.
        stages_per_rank: stages per rank.
        forward, backward: seconds of one micro-batch in all stages of a rank.
    """
    if pipeline == 1:
        return 0.0
    choice = CHOICES[schedule]
    if choice.splits_backward:
        # Weight gradients, half of backward, fill most of the gap (arXiv:2401.10241, table 1).
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
    """Return the predicted time of a step.

    Args:
        table: of the module's parameters.
        cost: of a pass, cut as the layout cuts it.
        work: layout and step.
        shares: parts of the model on those ranks of the pipeline that may be the busiest.
        profile: of the devices.
        precision: of the group of that name.
    """
    passes = max((_Passes(cost, work, share, profile, precision) for share in shares), key=lambda each: each.seconds)
    share = passes.share
    blocks, heaviest, outside = table.of_share(share, work.division)
    micro_batches = work.rounds * work.parts
    reading = _reading(blocks.plus(outside), profile)
    compute = micro_batches * max(passes.seconds, reading)
    forward, backward = passes.forward, passes.backward
    bubble = work.rounds * bubble_of(work.schedule, work.layout.pipeline, work.stages_per_rank, forward, backward)
    traffic = defaultdict[str, Traffic](Traffic)
    for axis, each in (
        *_within_passes(cost, work, share, profile, micro_batches),
        *_of_pipeline(cost, work, profile, compute),
        *_of_state(work, blocks, outside, heaviest, passes, profile),
    ):
        if each.seconds:
            traffic[axis] += each
    update = _update(work, blocks.plus(outside), profile)
    if profile.share < 1 and work.has_pipeline:
        rest = update + sum(each.exposed for each in traffic.values())
        whole = share_of(table.facts.kinds, [range(len(table.facts.kinds))], 1, work.schedule, 0)
        mean = _Passes(cost, work, whole, profile, precision).seconds / work.layout.pipeline
        critical, compute = compute + bubble, micro_batches * max(mean, reading)
        bubble = idle(critical + rest, compute + rest, profile.share)
    return PredictedStepTime(compute, bubble, update, traffic, model_flops(table, cost, work))


def idle(critical: float, work: float, share: float) -> float:
    """Return the seconds per step in which a rank's part of a core is idle.

    A waiting rank leaves its part of a shared core to others: the step lasts as long as with one core per rank, or
    as long as all work, whichever is longer.

    Args:
        critical: seconds of compute and waiting of the busiest pipeline rank, with its part of a core.
        work: mean seconds of a rank, with the same part.
        share: that part, less than 1.
    """
    return max(share * critical - work, 0.0)


def model_flops(table: StateTable, cost: PassCost, work: Work) -> float:
    """Return the operations of a step on all ranks; backward counts as twice forward."""
    ranks = work.layout.tensor * work.layout.context
    counts = {kind: table.facts.kinds.count(kind) for kind in set(table.facts.kinds)}
    forward = sum(count * cost.blocks[kind].flops for kind, count in counts.items())
    forward += cost.before.flops + cost.after.flops
    return 3 * forward * ranks * work.micro_batch * work.rounds * work.parts * work.layout.data_ranks


class _Passes:
    """Compute time of a micro-batch on a rank."""

    def __init__(self, cost: PassCost, work: Work, share: StageShare, profile: DeviceProfile, precision: str) -> None:
        self.share = share
        parts, samples, per_call = _parts_of(cost, share), work.micro_batch, profile.operation_seconds

        def pass_of(flops: str, moved: str, calls: str, gathering: float) -> float:
            seconds: float = samples * sum(n * getattr(part, flops) for part, n in parts) / profile.flops_at(precision)
            seconds += sum(n * getattr(part, moved).of(samples) for part, n in parts) / profile.memory_bandwidth
            launches: float = sum(n * getattr(part, calls) for part, n in parts) * per_call + gathering
            # Launches are added on a CPU, overlapped on a GPU.
            return seconds + launches if profile.is_cpu else max(seconds, launches)

        # Parameters are gathered for forward and for backward, and gradients reduced, block by block.
        gathered = sum(share.blocks.values()) + 1 if work.division.splits_parameters else 0
        gathering = gathered * profile.gather_seconds
        self.forward = pass_of("flops", "moved", "calls", gathering)
        self.backward = pass_of("backward", "backward_moved", "backward_calls", 2 * gathering)

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def _parts_of(cost: PassCost, share: StageShare) -> list[tuple[ModelPart, int]]:
    """Return the parts of a pass that a rank runs, each with its multiplicity."""
    parts = [(cost.blocks[kind], count) for kind, count in share.blocks.items()]
    parts += [(cost.before, 1)] if share.has_first else []
    parts += [(cost.after, 1)] if share.has_last else []
    return parts


def _reading(state: UnitState, profile: DeviceProfile) -> float:
    """Return the memory-bound minimum of a micro-batch: weights are read twice, their gradients written once."""
    return (2 * state.whole + state.whole_gradients) / profile.memory_bandwidth


def _within_passes(
    cost: PassCost, work: Work, share: StageShare, profile: DeviceProfile, micro_batches: int
) -> Iterator[tuple[str, Traffic]]:
    """Yield the communication of blocks along the tensor, context and expert axes, which is never overlapped."""
    links = {axis: link_of(profile, work.layout, axis) for axis in ("tensor", "context", "expert")}
    for part, count in _parts_of(cost, share):
        for (name, kind), sent in part.sent.items():
            axis = "expert" if name == "context-expert" else name  # if both axes have the same ranks
            if axis not in links:
                continue
            link, size = links[axis], sent.least * work.micro_batch
            seconds = link.seconds_of(size, rounds=_ROUNDS.get(kind, 1) * sent.calls)
            seconds += sent.calls * (link.call + (link.latency if kind == "send" else 0.0))
            times = count * micro_batches
            yield axis, Traffic(size * times, seconds * times, seconds * times)


def _of_pipeline(cost: PassCost, work: Work, profile: DeviceProfile, compute: float) -> Iterator[tuple[str, Traffic]]:
    """Yield the communication of activations and their gradients between stages."""
    if not work.has_pipeline:
        return
    link = link_of(profile, work.layout, "pipeline")
    times = 2 * work.stages_per_rank * work.parts * work.rounds
    size = cost.boundary.of(work.micro_batch)
    seconds = times * (link.latency + link.call + size / link.bandwidth)
    exposed = seconds if work.schedule in _WAITS_FOR_SENDS else _exposed_seconds(seconds, times, compute)
    yield "pipeline", Traffic(times * size, seconds, exposed)


def _exposed_seconds(seconds: float, pieces: float, window: float) -> float:
    """Return the seconds added to a step by collectives in ``pieces`` parts, overlapped with compute."""
    waits = overlapped(seconds, max(round(pieces), 1), window)
    return waits + _INTERFERENCE * (seconds - waits)


def _of_state(
    work: Work, blocks: UnitState, outside: UnitState, heaviest: UnitState, passes: _Passes, profile: DeviceProfile
) -> Iterator[tuple[str, Traffic]]:
    """Yield the communication of gradients and gathered parameters along the shard and replicate axes."""
    layout, state = work.layout, blocks.plus(outside)
    pieces = max(round(blocks.whole / heaviest.whole), 1) + 1 if heaviest.whole else 1
    if not work.division.splits_parameters:
        pieces = max(math.ceil(state.whole_gradients / BUCKET_BYTES), 1)
    shards, copies = link_of(profile, layout, "state"), link_of(profile, layout, "replicate")
    backward, forward = passes.backward, passes.forward

    def wait(axis: str, link: MeasuredLink, kind: str, size: float, times: float, window: float) -> tuple[str, Traffic]:
        sent, seconds = collective(link, kind, size, pieces)
        exposed = seconds if work.has_pipeline or not window else _exposed_seconds(seconds, pieces, window)
        return axis, Traffic(sent * times, seconds * times, exposed * times)

    if work.stage == 0:
        yield wait("replicate", copies, "all_reduce", state.whole_gradients, 1, backward)
        return
    reductions = 1 if work.stage == 1 or work.no_sync else work.rounds
    yield wait("shard", shards, "reduce_scatter", state.whole_gradients, reductions, backward)
    if work.division.splits_parameters:
        # Blocks are gathered for forward and for backward; parts outside of them once.
        yield wait("shard", shards, "all_gather", blocks.whole + outside.whole, work.rounds, forward)
        if not work.has_pipeline:
            yield wait("shard", shards, "all_gather", blocks.whole, work.rounds, backward)
        yield wait("replicate", copies, "all_reduce", state.gradients, 1, backward)
    else:
        yield wait("shard", shards, "all_gather", state.whole, 1, 0.0)
        yield wait("replicate", copies, "all_reduce", state.gradients, 1, 0.0)


def _update(work: Work, state: UnitState, profile: DeviceProfile) -> float:
    """Return the seconds of the optimizer, which reads gradients, and reads and writes parameters and state."""
    moved = state.gradients + 2 * (state.stepped + state.optimizer)
    if work.offload == "none":
        return moved / profile.memory_bandwidth
    # Gradients go to the host and parameters return; the host computes at about the speed of that link.
    return (state.gradients + state.stepped + moved) / profile.host_bandwidth
