"""Predicted seconds of collectives, bubbles and operation launches."""

import pytest

from tests.planning.planned import planned
from trainwright.core.device_profiles import profile_named
from trainwright.core.layout import Layout
from trainwright.planning.time.step import bubble_of, collective, link_of


def test_seconds_of_collectives_and_bubbles() -> None:
    profile = profile_named("h100")
    within = link_of(profile, Layout(shard=2, tensor=8), "tensor")
    assert (within.ranks, within.bandwidth) == (8, 450e9)
    across = link_of(profile, Layout(shard=4, tensor=8), "state")
    assert across.bandwidth == 50e9, "one rank of a node sends over one card"
    whole = link_of(profile, Layout(shard=64), "state")
    assert whole.bandwidth == 400e9, "eight ranks of a node send over eight"
    sent, seconds = collective(whole, "all_gather", 64e9)
    assert sent == pytest.approx(63e9)
    assert seconds == pytest.approx(63e9 / 400e9 + 63 * whole.latency + whole.call)
    assert bubble_of("1f1b", 4, 1, 1.0, 2.0) == pytest.approx(9.0)
    assert bubble_of("interleaved_1f1b", 4, 3, 1.0, 2.0) == pytest.approx(3.0)
    assert bubble_of("zbv", 4, 2, 1.0, 2.0) == pytest.approx(1.5)
    assert bubble_of("1f1b", 1, 1, 1.0, 2.0) == 0.0


@pytest.mark.thorough
def test_launches_of_operations() -> None:
    """Added to compute on a CPU; on a GPU only if launches take longer than compute."""
    words = ("recipe=gpt", "accelerator=cpu", "device=cpu", "global_batch_size=8", "micro_batch_size=1")
    free, usual, slow = (
        planned(*words, f"device.operation_seconds={seconds}").ranked[0].time.compute for seconds in (0, 1e-5, 1e-3)
    )
    assert usual - free == pytest.approx((slow - free) / 100)
    on_gpu = [
        planned("recipe=gpt", "accelerator=cpu", "device=h100", f"device.operation_seconds={seconds}")
        .ranked[0].time.compute
        for seconds in (0, 1e-12, 1e-3)
    ]  # fmt: skip
    assert on_gpu[0] == on_gpu[1] < on_gpu[2]
