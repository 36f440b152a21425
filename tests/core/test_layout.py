"""Sizes of mesh axes, and strategies by name."""

from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainwright.core.layout import Layout
from trainwright.strategies.contract.groups import new_subgroup
from trainwright.strategies.contract.registry import make_strategy, strategy_names
from trainwright.strategies.data.ddp import DDPStrategy
from trainwright.strategies.data.single import SingleDeviceStrategy
from trainwright.strategies.data.zero import ZeroStrategy


def test_the_rest_is_found_and_layouts_are_printed():
    with pytest.raises(ValueError, match="resolve"):
        _ = Layout(shard=-1).world_size
    assert str(Layout(replicate=2, shard=4)) == "replicate 2 x shard 4"
    assert str(Layout()) == "one rank"
    assert Layout(replicate=2, shard=-1).resolve(8) == Layout(replicate=2, shard=4)
    assert Layout(replicate=2, shard=4).resolve(8).world_size == 8
    assert Layout(replicate=2, shard=4).data_ranks == 8


@pytest.mark.parametrize(("layout", "world_size"), [
    (Layout(replicate=3, shard=-1), 8), (Layout(replicate=2, shard=2), 8), (Layout(shard=16), 8),
])  # fmt: skip
def test_a_layout_that_does_not_fit_names_what_does(layout, world_size):
    with pytest.raises(ValueError, match=r"8 rank\(s\).*\(1, 2, 4, 8\).*strategy\.shard=-1"):
        layout.resolve(world_size)


def test_all_problems_of_a_layout_are_told_at_once():
    with pytest.raises(ValueError, match=r"replicate=0 .*; shard='x' "):
        Layout(replicate=0, shard="x")
    with pytest.raises(ValueError, match="replicate and shard are all -1"):
        Layout(replicate=-1, shard=-1)


@pytest.mark.parametrize(("name", "kind"), [
    ("single", SingleDeviceStrategy), ("ddp", DDPStrategy), ("zero1", ZeroStrategy), ("zero3", ZeroStrategy),
])  # fmt: skip
def test_strategies_by_name(name, kind):
    strategy = make_strategy(name)
    assert type(strategy) is kind
    assert name in strategy_names()
    if name.startswith("zero"):
        assert strategy.stage == int(name[-1])


@pytest.mark.parametrize(("options", "told"), [
    ({"stage": 4}, r"stage=4 \(allowed: 1, 2, 3\)"),
    ({"stage": 2, "offload": "parameters"}, "allowed with stage 3; use offload='optimizer'"),
    ({"stage": 2, "offload": "disk"}, "allowed: 'none', 'optimizer', 'parameters'"),
    ({"activation_checkpointing": "selective"}, "checkpoint_modules="),
])  # fmt: skip
def test_impossible_options_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        ZeroStrategy(**options)


def test_an_unknown_name_is_answered_with_the_nearest_and_one_device_is_one():
    with pytest.raises(ValueError, match=r"Unknown strategy 'zeor3'\. Did you mean 'zero3'\? Available: single, ddp"):
        make_strategy("zeor3")
    with pytest.raises(ValueError, match=r"devices=2 were given.*devices=1"):
        SingleDeviceStrategy().parallel_devices = [torch.device("cpu")] * 2


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


@pytest.mark.parametrize("layout", [
    Layout(pipeline=2, replicate=3, shard=2, context=2, tensor=2, expert=2),
    Layout(replicate=2, shard=4, tensor=3, expert=4),
    Layout(shard=2, context=3, expert=6),
    Layout(),
])  # fmt: skip
def test_groups_are_those_of_the_coordinates(layout):
    for count in (1, 2, 3):
        for axes in combinations(AXES, count):
            groups = by_coordinates(layout, axes)
            assert layout.groups(*axes) == groups
            for rank in (0, layout.world_size // 2, layout.world_size - 1):
                assert layout.group_of(rank, *axes) == next(group for group in groups if rank in group)
    places = [layout.data_rank(rank) for rank in range(layout.world_size)]
    firsts = [places.index(rank) for rank in range(layout.data_ranks)]
    assert [layout.first_of_data_rank(rank) for rank in range(layout.data_ranks)] == firsts


def test_a_rank_makes_its_own_group_alone_under_the_name_that_torch_gives_it(monkeypatch):
    made = []
    new_group = dist.new_group

    def counted(ranks=None, **given):
        made.append(ranks)
        return new_group(ranks, **given)

    layout = Layout(replicate=500, shard=8)
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
