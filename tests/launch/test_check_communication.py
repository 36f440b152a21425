"""Ways to send that cannot be had are refused before a process starts."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from trainwright.command.auto import ways_to_send
from trainwright.core.layout import Layout
from trainwright.strategies.contract.options import PlannedRun
from trainwright.strategies.data.zero_options import ZeroOptions


def refusals(layout: Layout | None, compression: str = "none", launch: dict[str, Any] | None = None, **given: Any):
    options = ZeroOptions(**{"stage": 2, **given})
    cfg = OmegaConf.create(
        {
            "precision": "32-true",
            "compression": {"name": compression},
            "launch": {"recovery": "restart", "min_devices": None, **(launch or {})},
        }
    )
    found = [*options.problems(), *options.run_problems(PlannedRun(cfg, layout=layout, devices=4))]
    return [*found, *([] if layout is None else options.layout_problems(layout))]


def test_possible():
    assert refusals(Layout(replicate=8), average_by="hierarchical") == []
    assert refusals(Layout(replicate=4), average_by="hierarchical", ranks_per_node=2) == []
    assert refusals(None, average_by="hierarchical") == []
    assert refusals(Layout(shard=4), stage=3, prefetch=2) == []
    assert refusals(Layout(), stage=3, prefetch=2) == [], "one rank alone"


@pytest.mark.parametrize(("layout", "options", "parts"), [
    (Layout(replicate=4), {"average_by": "hierarchical"}, ["one node holds all", "strategy.ranks_per_node"]),
    (Layout(shard=8), {"average_by": "reduce_scatter"}, ["there is only one", "strategy.replicate=2"]),
    (Layout(replicate=8), {"average_by": "tree"}, ["strategy.average_by=tree", "all_reduce, reduce_scatter"]),
    (
        Layout(replicate=8),
        {"average_by": "hierarchical", "compression": "int8"},
        ["compression=int8", "compression=none"],
    ),
    (
        Layout(replicate=8),
        {"average_by": "reduce_scatter", "launch": {"recovery": "replicas"}},
        ["launch.recovery=replicas", "launch.recovery=restart"],
    ),
    (
        Layout(replicate=8),
        {"average_by": "hierarchical", "launch": {"min_devices": 2}},
        ["launch.min_devices=2", "unequal numbers"],
    ),
    (Layout(shard=8), {"prefetch": 2}, ["stage 2 has no effect", "strategy.stage=3"]),
    (Layout(replicate=8), {"prefetch": 2, "stage": 3}, ["shard=1 has no effect", "strategy.shard=2"]),
])  # fmt: skip
def test_impossible(layout, options, parts):
    (problem,) = refusals(layout, **options)
    assert all(part in problem for part in parts), problem


@pytest.mark.parametrize(("asked", "launch", "expected"), [
    ({}, {}, ["strategy.average_by=hierarchical", "strategy.prefetch=3"]),
    ({"average_by": "all_reduce", "prefetch": 0}, {}, ["strategy.average_by=all_reduce", "strategy.prefetch=0"]),
    ({}, {"min_devices": 2}, ["strategy.prefetch=3"]),
])  # fmt: skip
def test_what_the_planner_chose_counts_where_nothing_else_was_typed(asked, launch, expected):
    cfg = OmegaConf.create(
        {
            "strategy": {"average_by": None, "prefetch": None, **asked},
            "compression": {"name": "none"},
            "launch": {"recovery": "restart", "min_devices": None, **launch},
        }
    )
    chosen = {"average_by": "hierarchical", "prefetch": 3, "strategy": "hybrid", "stage": 3, "layout": {"replicate": 4}}
    assert list(ways_to_send(cfg, chosen)) == expected
