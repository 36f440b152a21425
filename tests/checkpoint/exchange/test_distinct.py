"""Collectives of mostly equal values, and their traffic."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainwright.checkpoint.exchange import groups
from trainwright.checkpoint.exchange.distinct import (
    all_gather_values,
    any_of_ranks,
    equal_ranks,
    gather_distinct,
    problems_of_ranks,
)
from trainwright.checkpoint.write.assignment import Assignment
from trainwright.checkpoint.write.save import Content, write
from trainwright.strategies.contract.communication.calls import CollectiveCall, listen
from trainwright.strategies.contract.same_model import refuse_different_models


@contextmanager
def sent() -> Iterator[list[CollectiveCall]]:
    calls: list[CollectiveCall] = []
    end = listen(calls.append)
    try:
        yield calls
    finally:
        end()


def talk() -> dict[str, Any]:
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    pairs = [None, {"a": 1}, {"a": 1}, "other"]
    with sent() as calls:
        alike = all_gather_values({"same": [1, 2]}, group)
    said = all_gather_values(pairs[rank], group)
    equal = equal_ranks(repr(pairs[rank]).encode(), group)
    return {
        "alike": alike,
        "calls": [call.kind for call in calls],
        "said": said,
        "shared": said[1] is said[2],
        "kin": (equal.of_rank, equal.firsts),
        "first": list(gather_distinct(repr(pairs[rank]).encode(), equal, group).values()),
        "any": [any_of_ranks(rank == 2, group), any_of_ranks(False, group)],
        "problems": [problems_of_ranks(None, group), problems_of_ranks("full" if rank % 2 else None, group)],
    }


def test_collectives_of_values(ranks: Any) -> None:
    for rank, found in enumerate(ranks(talk, 4)):
        assert found["alike"] == [{"same": [1, 2]}] * 4
        assert found["calls"] == ["all_gather"]
        assert found["said"] == [None, {"a": 1}, {"a": 1}, "other"]
        assert found["shared"]
        assert found["kin"] == ([0, 1, 1, 2], [0, 1, 3])
        assert found["first"] == ([b"None", b"{'a': 1}", b"'other'"] if rank == 0 else [])
        assert found["any"] == [True, False]
        assert found["problems"] == [{}, {1: "full", 3: "full"}]


def sent_by_one_of(ranks: int, action: Callable[[], Any]) -> list[tuple[str, int]]:
    """What rank 0 of so many gives to collectives, which torch's fake process group ends at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with sent() as calls:
            action()
    finally:
        dist.destroy_process_group()
    return [(call.kind, call.size) for call in calls]


@pytest.mark.parametrize("ranks", [1_000, 10_000])
def test_traffic_is_independent_of_world_size(tmp_path: Any, ranks: int) -> None:
    def start() -> None:
        refuse_different_models(nn.Linear(3, 3), torch.device("cpu"))
        assert not problems_of_ranks(None, dist.group.WORLD)

    def save() -> None:
        write(Content({}, {}, {}, Assignment(frozenset(), [], {})), str(tmp_path / "saved"), dist.group.WORLD)

    assert sent_by_one_of(ranks, start) == sent_by_one_of(10, start) == [("all_reduce", 16), ("all_reduce", 8)]
    calls = sent_by_one_of(ranks, save)
    assert calls == sent_by_one_of(10, save)
    kinds = ["all_reduce", "all_reduce", "broadcast", "broadcast", "all_reduce", "all_reduce"]
    assert [kind for kind, _ in calls] == kinds
    assert sum(size for _, size in calls) < 500


@pytest.mark.parametrize("ranks", [10, 1_000])
def test_equal_values_are_sent_as_hashes(ranks: int) -> None:
    assert sent_by_one_of(ranks, lambda: all_gather_values("x" * 10_000, dist.group.WORLD)) == [
        ("all_gather", 24 * ranks)
    ]


def connected_late() -> tuple[float, bool]:
    with mock.patch.object(groups, "_MOST_CONNECTIONS", 1):
        group = groups.gloo_group()
    ones = torch.ones(3)
    dist.all_reduce(ones, group=group)
    dist.barrier(group)
    return ones.sum().item(), groups._CONNECT_LATE in os.environ


def test_lazy_connections(ranks: Any) -> None:
    assert ranks(connected_late, 3) == [(9.0, False)] * 3
