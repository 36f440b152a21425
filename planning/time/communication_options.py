"""Communication options of a layout for the links of a profile, where several compute the same."""

from __future__ import annotations

from trainwright.core.device_profiles import DeviceProfile
from trainwright.core.layout import Layout
from trainwright.planning.search.plan import USABLE, LayoutCandidate, Plan
from trainwright.planning.search.work import BUCKET_BYTES
from trainwright.planning.time.step import collective, link_of
from trainwright.strategies.compose.rules import cuts_module
from trainwright.strategies.contract.communication.advice import FASTER, MeasuredLink, best_bucket_bytes
from trainwright.strategies.contract.communication.options import HIERARCHICAL, copies_of_a_node
from trainwright.strategies.contract.communication.prefetch_depth import BlockTimes, best_depth

_MIB = 2**20
# Bytes; smaller buckets have call overheads that the model of links lacks.
_LEAST_BUCKET = 2**18
# Of ZeRO: one being packed, and those in flight.
_BUCKETS_AT_ONCE = 3


def bucket_mib(plan: Plan, candidate: LayoutCandidate) -> float | None:
    """Return the gradient bucket size with the least exposed communication, in MiB.

    Small buckets leave little to send after backward, large ones pay latency less often, see ``best_bucket_bytes``.
    ZeRO packs several at once, which must fit into memory.

    Args:
        plan: of the candidate.
        candidate: of its layouts.

    Returns:
        None where gradients are not sent in buckets: one rank, stage 3, layouts that cut the module.
    """
    layout, stage = candidate.layout, candidate.work.stage
    if layout.world_size == 1 or cuts_module(layout) or stage == 3:
        return None
    axis = "state" if stage else "replicate"
    size = 4.0 * plan.parameters
    best = max(best_bucket_bytes(link_of(plan.profile, layout, axis), size), _LEAST_BUCKET)
    if stage:
        free = max(USABLE * plan.profile.memory_bytes - candidate.memory.total, 0.0)
        best = min(best, BUCKET_BYTES + free / _BUCKETS_AT_ONCE)
    return float(f"{best / _MIB:.3g}")


def average_by(plan: Plan, candidate: LayoutCandidate) -> str | None:
    """Choose how to average replicas: in two levels if that takes at most 90 % of the time of an all-reduce.

    Reduce-scatter and all-gather send as many bytes in as many rounds as an all-reduce, so they are never better.

    Args:
        plan: of the candidate.
        candidate: of its layouts.

    Returns:
        None: one all-reduce, the default; always without two levels, and with stage 3, which overlaps all-reduces with
        backward but not two levels.
    """
    layout, profile = candidate.layout, plan.profile
    copies = copies_of_a_node(layout, max(profile.devices_per_node, 1))
    if candidate.work.stage == 3 or not 1 < copies < layout.replicate:
        return None
    size = 4.0 * plan.parameters * layout.replicate / layout.world_size
    flat = one_level(profile, layout, size)
    return HIERARCHICAL if two_levels(profile, layout.replicate, copies, size) <= FASTER * flat else None


def one_level(profile: DeviceProfile, layout: Layout, size: float) -> float:
    """Return the seconds of one all-reduce over all replicas, with several per node.

    NCCL builds rings and trees over the network cards of all devices of a node. gloo has one ring in order of ranks: it
    leaves a node from one of them, so the slowest link limits all messages.

    Args:
        profile: of the devices.
        layout: closed.
        size: bytes of gradients.
    """
    if not profile.is_cpu:
        return collective(link_of(profile, layout, "replicate"), "all_reduce", size)[1]
    bandwidth = min(profile.within.bandwidth, profile.across.bandwidth)
    latency = max(profile.within.latency, profile.across.latency)
    return MeasuredLink("replicate", layout.replicate, latency, bandwidth).seconds("all_reduce", size)


def two_levels(profile: DeviceProfile, replicas: int, copies: int, size: float) -> float:
    """Return the seconds of averaging within nodes, then across them.

    Args:
        profile: of the devices.
        replicas: number of replicas.
        copies: of these, per node.
        size: bytes of gradients.
    """
    within = MeasuredLink("within", copies, profile.within.latency, profile.within.bandwidth)
    across = MeasuredLink("across", replicas // copies, profile.across.latency, profile.across.bandwidth)
    seconds = sum(collective(within, kind, size)[1] for kind in ("reduce_scatter", "all_gather"))
    return seconds + collective(across, "all_reduce", size / copies)[1]


def prefetch(plan: Plan, candidate: LayoutCandidate) -> int | None:
    """Return the number of blocks that stage 3 gathers ahead: as many as reduce waiting and fit into memory.

    Args:
        plan: of the candidate.
        candidate: of its layouts.

    Returns:
        None: one, the default, or nothing is gathered block by block.
    """
    work, block, count = candidate.work, candidate.block, candidate.blocks
    if not work.division.splits_parameters or work.has_pipeline or work.layout.state_ranks == 1 or not block.whole:
        return None
    link = link_of(plan.profile, work.layout, "state")
    compute = candidate.time.compute / work.rounds / count
    reduces = work.rounds == 1 or not work.no_sync
    times = BlockTimes(
        blocks=count,
        forward=compute / 3,
        backward=2 * compute / 3,
        gather=collective(link, "all_gather", block.whole)[1],
        reduce=collective(link, "reduce_scatter", block.whole_gradients)[1] if reduces else 0.0,
    )
    free = USABLE * plan.profile.memory_bytes - candidate.memory.total
    depth = best_depth(times, 1 + int(max(free, 0.0) // block.whole))
    return depth if depth > 1 else None
