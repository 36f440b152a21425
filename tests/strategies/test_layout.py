"""Sizes of mesh axes, and strategies by name."""

from __future__ import annotations

import pytest

from trainwright.strategies.ddp import DDPStrategy
from trainwright.strategies.layout import Layout
from trainwright.strategies.registry import make_strategy, strategy_names
from trainwright.strategies.single import SingleDeviceStrategy
from trainwright.strategies.zero import ZeroStrategy


def test_the_rest_is_found():
    assert Layout(replicate=2, shard=-1).resolve(8) == Layout(replicate=2, shard=4)
    assert Layout(replicate=2, shard=4).resolve(8).world_size == 8
    assert Layout(replicate=2, shard=4).data_ranks == 8


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [(Layout(replicate=3, shard=-1), 8), (Layout(replicate=2, shard=2), 8), (Layout(shard=16), 8)],
)
def test_a_layout_that_does_not_fit_names_what_does(layout, world_size):
    with pytest.raises(ValueError, match=r"8 rank\(s\).*\(1, 2, 4, 8\).*strategy\.shard=-1"):
        layout.resolve(world_size)


def test_all_problems_of_a_layout_are_told_at_once():
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


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"Unknown strategy 'zeor3'\. Did you mean 'zero3'\? Available: single, ddp"):
        make_strategy("zeor3")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"stage": 4}, r"stage=4 \(allowed: 1, 2, 3\)"),
        ({"stage": 2, "offload": "parameters"}, "allowed with stage 3; use offload='optimizer'"),
        ({"stage": 2, "offload": "disk"}, "allowed: 'none', 'optimizer', 'parameters'"),
        ({"activation_checkpointing": "selective"}, "checkpoint_modules="),
    ],
)
def test_impossible_options_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        ZeroStrategy(**options)


def test_one_device_takes_one_device():
    import torch

    strategy = SingleDeviceStrategy()
    with pytest.raises(ValueError, match=r"devices=2 were given.*devices=1"):
        strategy.parallel_devices = [torch.device("cpu")] * 2
