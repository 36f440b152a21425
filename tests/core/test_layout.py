"""Sizes of mesh axes, and strategies by name."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainwright.core.layout import Layout
from trainwright.strategies.contract.groups import new_subgroup
from trainwright.strategies.contract.registry import make_strategy, strategy_names
from trainwright.strategies.data.ddp import DDPStrategy
from trainwright.strategies.data.single import SingleDeviceStrategy
from trainwright.strategies.data.zero import ZeroStrategy


def test_resolve():
    assert Layout(replicate=2, shard=-1).resolve(8) == Layout(replicate=2, shard=4)
    assert Layout(replicate=2, shard=4).resolve(8).world_size == 8
    assert Layout(replicate=2, shard=4).data_ranks == 8


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [(Layout(replicate=3, shard=-1), 8), (Layout(replicate=2, shard=2), 8), (Layout(shard=16), 8)],
)
def test_invalid_layout_lists_valid_sizes(layout, world_size):
    with pytest.raises(ValueError, match=r"8 rank\(s\).*\(1, 2, 4, 8\).*strategy\.shard=-1"):
        layout.resolve(world_size)


def test_all_problems_of_a_layout_are_listed():
    with pytest.raises(ValueError, match=r"replicate=0 .*; shard='x' "):
        Layout(replicate=0, shard="x")
    with pytest.raises(ValueError, match="replicate and shard are all -1"):
        Layout(replicate=-1, shard=-1)


def test_an_open_layout_has_no_world_size():
    with pytest.raises(ValueError, match="resolve"):
        _ = Layout(shard=-1).world_size


def test_layouts_are_printed():
    assert str(Layout(replicate=2, shard=4)) == "replicate 2 x shard 4"
    assert str(Layout()) == "one rank"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("single", SingleDeviceStrategy), ("ddp", DDPStrategy), ("zero1", ZeroStrategy), ("zero3", ZeroStrategy)],
)
def test_strategies_by_name(name, kind):
    strategy = make_strategy(name)
    assert type(strategy) is kind
    assert name in strategy_names()
    if name.startswith("zero"):
        assert strategy.stage == int(name[-1])


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"Unknown strategy 'zeor3'\. Did you mean 'zero3'\? Available: single, ddp"):
        make_strategy("zeor3")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"stage": 4}, "ZeroStrategy: stage=4: must be a whole number of at least 1 and at most 3"),
        ({"stage": 2, "offload": "parameters"}, "only stage 3 shards parameters; type stage=3"),
        ({"stage": 2, "offload": "disk"}, "offload=disk: unknown; allowed: none, optimizer, parameters"),
        ({"activation_checkpointing": "selective"}, "checkpoint_modules="),
    ],
)
def test_invalid_options_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        ZeroStrategy(**options)


def test_single_device_strategy_refuses_more():
    import torch

    strategy = SingleDeviceStrategy()
    with pytest.raises(ValueError, match=r"this run has 2 .*devices=1"):
        strategy.parallel_devices = [torch.device("cpu")] * 2


AXES = ("pipeline", "replicate", "shard", "context", "tensor", "expert", "expert_shard")


def by_coordinates(layout, axes):
    """The same found rank by rank."""
    groups = {}
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        outer = (place["shard"] * layout.context + place["context"]) // layout.expert
        if "expert" in axes:
            place |= {"shard": outer, "context": 0, "expert": 0}
        elif "expert_shard" in axes:
            place |= {"shard": 0, "context": 0}
        else:
            place.pop("expert")
        groups.setdefault(tuple(0 if axis in axes else value for axis, value in place.items()), []).append(rank)
    return list(groups.values())


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipeline=2, replicate=3, shard=2, context=2, tensor=2, expert=2),
        Layout(replicate=2, shard=4, tensor=3, expert=4),
        Layout(shard=2, context=3, expert=6),
        Layout(),
    ],
)
def test_groups_match_coordinates(layout):
    for count in (1, 2, 3):
        for axes in combinations(AXES, count):
            groups = by_coordinates(layout, axes)
            assert layout.groups(*axes) == groups
            for rank in (0, layout.world_size // 2, layout.world_size - 1):
                assert layout.group_of(rank, *axes) == next(group for group in groups if rank in group)
    places = [layout.data_rank(rank) for rank in range(layout.world_size)]
    assert [layout.first_of_data_rank(rank) for rank in range(layout.data_ranks)] == [
        places.index(rank) for rank in range(layout.data_ranks)
    ]


def test_subgroups_are_created_without_other_ranks(monkeypatch):
    made = []
    new_group = dist.new_group

    def counted(ranks=None, **given):
        made.append(ranks)
        return new_group(ranks, **given)

    layout = Layout(replicate=500, shard=8)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    dist.destroy_process_group()  # resets torch's count of groups, which earlier tests may have left
    names = {}
    for enumerated in (True, False):
        dist.init_process_group("fake", store=FakeStore(), rank=77, world_size=layout.world_size)
        make = (lambda groups: dist.new_subgroups_by_enumeration(groups)[0]) if enumerated else new_subgroup
        if not enumerated:
            monkeypatch.setattr(dist, "new_group", counted)
        names[enumerated] = [make(layout.groups(axis)).group_name for axis in ("shard", "replicate", "shard")]
        assert new_subgroup([[1, 2], [3]]) is None
        dist.destroy_process_group()
    assert names[True] == names[False]
    assert made == [layout.group_of(77, axis) for axis in ("shard", "replicate", "shard")]
