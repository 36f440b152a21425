"""Communication options that the planner chooses by a profile."""

from dataclasses import replace

import pytest

from trainwright.core.device_profiles import DeviceProfile, LinkProfile
from trainwright.core.layout import Layout
from trainwright.planning.memory.peak import Held
from trainwright.planning.memory.state import UnitState
from trainwright.planning.search.plan import LayoutCandidate, Plan
from trainwright.planning.search.work import Work
from trainwright.planning.time.communication_options import average_by, one_level, prefetch, two_levels
from trainwright.planning.time.step import PredictedStepTime, collective, link_of

PROFILE = DeviceProfile(
    "made up", 80 * 2**30, {"float32": 1e14}, 3e12, 0.5, 8,
    LinkProfile(latency=1e-6, bandwidth=400e9), LinkProfile(latency=20e-6, bandwidth=25e9), 5e10, 2**40,
)  # fmt: skip
PARAMETERS = 100_000_000


def plan_of(profile: DeviceProfile = PROFILE) -> Plan:
    return Plan("x", 64, profile, "32", None, (), (), parameters=PARAMETERS)


def candidate(layout: Layout, stage: int, compute: float = 1.0, block: float = 0.0) -> LayoutCandidate:
    state = UnitState(whole=block, whole_gradients=block)
    return LayoutCandidate(
        "ddp", Work(layout, stage), None, Held(), PredictedStepTime(compute, 0.0, 0.0), 64, blocks=32, block=state,
    )  # type: ignore[arg-type]  # fmt: skip


CPU = replace(PROFILE, name="cpu, made up")
WIDE = candidate(Layout(replicate=64), 0)


def test_seconds_of_one_and_two_levels():
    size = 4.0 * PARAMETERS
    ring = 2 * 63 * 20e-6 + 2 * 63 / 64 * size / 25e9
    assert one_level(CPU, WIDE.layout, size) == pytest.approx(ring), "one ring, limited by its slowest link"
    cards = collective(link_of(PROFILE, WIDE.layout, "replicate"), "all_reduce", size)[1]
    assert one_level(PROFILE, WIDE.layout, size) == cards, "all network cards of a node"
    within, across = 2 * (7e-6 + 7 / 8 * size / 400e9), 2 * 7 / 8 * size / 8 / 25e9 + 2 * 7 * 20e-6
    assert two_levels(PROFILE, 64, 8, size) == pytest.approx(within + across, rel=0.05)


def test_two_levels_if_faster():
    assert average_by(plan_of(CPU), WIDE) == "hierarchical"
    assert average_by(plan_of(), WIDE) is None, "NCCL uses all cards by itself"
    assert average_by(plan_of(replace(CPU, across=CPU.within)), replace(WIDE, work=Work(Layout(replicate=16)))) is None


def test_one_level_if_there_are_no_two():
    assert average_by(plan_of(CPU), candidate(Layout(replicate=8), 0)) is None, "one node"
    assert average_by(plan_of(CPU), candidate(Layout(replicate=8, shard=8), 2)) is None, "a copy fills a node"
    assert average_by(plan_of(CPU), candidate(Layout(replicate=64), 3)) is None, "FSDP2 hides its all-reduce"


def test_prefetch_depth():
    layout = Layout(shard=64)
    compute = 32 * 3.0  # a second forward and two backward for each block
    link = link_of(PROFILE, layout, "state")
    block = 1.2 * link.bandwidth * 64 / 63  # gathered in 1.2 s
    assert prefetch(plan_of(replace(PROFILE, memory_bytes=10**15)), candidate(layout, 3, compute, block)) == 2
    assert prefetch(plan_of(), candidate(layout, 3, compute, block)) is None, "no memory for two"
    assert prefetch(plan_of(), candidate(layout, 3, compute, block / 10)) is None, "one is enough"
    assert prefetch(plan_of(), candidate(Layout(replicate=64), 3, compute, block)) is None, "nothing is gathered"
