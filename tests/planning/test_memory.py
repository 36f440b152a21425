"""Predicted memory equals live bytes on ranks, including activations and buffers."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from tests.parity.layouts import LayoutCase
from tests.parity.test_layouts import FOUR, TWO
from tests.planning.bytes_of_ranks import measured, predictor
from trainwright.planning.layout_report import StateRules, bytes_of_ranks
from trainwright.planning.model.experts import EVEN, Routing, probability_sent
from trainwright.strategies.compose.engine_options import EngineOptions

WITHIN = 0.05


def data_parallel(strategy: str, accumulation: int = 1) -> LayoutCase:
    return LayoutCase("gpt-untied", {}, strategy=strategy, accumulation=accumulation, global_batch_size=16, samples=96)


# One of each kind of layout of the parity matrix; `python -m benchmarks.planner` has all.
CASES: dict[str, tuple[int, LayoutCase]] = {
    "ddp": (2, data_parallel("ddp", 2)),
    "zero2": (2, data_parallel("zero2", 2)),
    "zero3": (2, data_parallel("zero3")),
    "zero3, two ahead": (2, replace(data_parallel("zero3"), options={"prefetch": 2})),
    **{
        name: (2, TWO[name])
        for name in ("context, gpt, ring", "pipeline, looped_bfs", "pipeline, dualpipev", "expert, mixtral")
    },
    **{name: (4, FOUR[name]) for name in ("pipeline x shard", "tensor x shard, stage 1")},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", list(CASES))
def test_predicted_memory(ranks, name):
    world_size, case = CASES[name]
    found = predictor(case.network, case.length)
    layout = found.layout_of(case, world_size)
    alive = ranks(measured, world_size, case, layout.data_ranks, timeout=120)
    for place in range(layout.pipeline):
        there = [each for rank, each in enumerate(alive) if layout.coordinates(rank)["pipeline"] == place]
        most, routing = max(there, key=lambda each: each[0])
        moments = found.all_moments(case, world_size, routing)[place]
        predicted = max(moments, key=lambda held: held.total + held.host)
        assert predicted.total + predicted.host == pytest.approx(most, rel=WITHIN), (place, predicted)


@pytest.mark.parametrize(("experts", "chosen", "ranks_"), [(4, 2, 2), (8, 2, 8), (8, 3, 2), (6, 1, 3)])
def test_even_routing_is_the_mean_of_all_choices(experts, chosen, ranks_):
    choices = list(combinations(range(experts), chosen))
    travels = sum(len({each // (experts // ranks_) for each in choice}) for choice in choices) / len(choices)
    assert ranks_ * probability_sent(experts, chosen, ranks_) == pytest.approx(travels)


def test_received_tokens_need_memory():
    network = predictor("mixtral", 9)
    case = LayoutCase("mixtral", {"expert": 2})
    even, default, more = (
        max(held.total for held in network.all_moments(case, 2, routing)[0])
        for routing in (EVEN, Routing(), Routing(received=1.5, computed=1.5))
    )
    assert even == default
    assert more > 1.05 * even


STATES: list[tuple[str, int, dict[str, Any]]] = [
    ("gpt", 4, {"pipeline": 2, "shard": 2, "stage": 2}),
    ("gpt-untied", 3, {"shard": 3, "stage": 3}),
    ("gpt-untied", 8, {"tensor": 2, "shard": 4, "stage": 1}),
    ("gpt", 8, {"pipeline": 2, "tensor": 2, "replicate": 2, "shard": 1, "stage": 3}),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("network", "world_size", "options"), STATES)
def test_state_equals_layout_report(network, world_size, options):
    found = predictor(network, 9)
    case = LayoutCase(network, options)
    layout, places = found.layout_of(case, world_size), found.all_moments(case, world_size)
    given = {key: value for key, value in options.items() if key in EngineOptions.__dataclass_fields__}
    reported = bytes_of_ranks(found.module, layout, EngineOptions(**given), StateRules(options["stage"]))
    for place, moments in enumerate(places):
        most = max(
            (each for rank, each in enumerate(reported) if layout.coordinates(rank)["pipeline"] == place),
            key=lambda each: each.total,
        )
        step = moments[-1]
        assert (step.parameters, step.gradients, step.optimizer) == (most.parameters, most.gradients, most.optimizer)
