"""Counts of the benchmark of many ranks."""

from __future__ import annotations

import pytest

from benchmarks.scale import ITEMS, connections, layout_of, planned, started
from trainwright.core.layout import Layout


def test_a_layout_for_each_world() -> None:
    assert layout_of(10) == Layout(replicate=5, shard=2)
    assert layout_of(1_000) == Layout(replicate=125, shard=8)
    assert layout_of(100_000) == Layout(replicate=3125, shard=32)


@pytest.mark.sample(10)
@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.name)
def test_what_is_sent_does_not_follow_the_ranks(item) -> None:
    few, many = (item.measure(Layout(replicate=replicate, shard=2)) for replicate in (5, 50))
    if item.name in (
        "one model on all ranks",
        "is anything wrong",
        "save, beside tensors",
        "replica check, hashing apart",
    ):
        assert few.messages == many.messages
        assert many.bytes < 1.3 * few.bytes  # of an all-reduce, (n - 1) / n
    else:
        assert many.seconds > 0


def test_of_a_start_rank_0_alone_asks_for_every_machine() -> None:
    layouts = [Layout(replicate=replicate, shard=8) for replicate in (2, 20)]
    assert [started(0)(layout).messages for layout in layouts] == [1 + 2, 1 + 20]
    assert [started(1)(layout).messages for layout in layouts] == [2, 2]


@pytest.mark.thorough
def test_a_plan_is_timed() -> None:
    assert planned(Layout(shard=2), size="nano").seconds > 0


def test_ranks_of_gloo_connect_when_they_send() -> None:
    every, used = (connections(12, late)[0] for late in (False, True))
    assert used < every
