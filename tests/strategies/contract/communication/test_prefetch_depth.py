"""How far ahead to gather, and which way to average: pure arithmetic."""

from dataclasses import replace

import pytest

from trainwright.strategies.contract.communication.advice import Way, fastest_way, fit_way
from trainwright.strategies.contract.communication.prefetch_depth import BlockTimes, best_depth

TIMES = BlockTimes(blocks=8, forward=1.0, backward=2.0, gather=0.5, reduce=0.5)


def test_depth_zero_exposes_every_gather():
    alone = replace(TIMES, reduce=0.0)
    assert alone.waits(0) == pytest.approx(2 * 8 * 0.5)
    assert alone.waits(1) == pytest.approx(2 * 0.5), "the first of each direction has nothing to hide behind"
    assert TIMES.waits(1) == pytest.approx(alone.waits(1) + 0.5), "and the last reduction"


def test_depth_does_not_help_a_saturated_link():
    full = replace(TIMES, gather=2.0, reduce=2.0)
    assert full.waits(4) == pytest.approx(2 * 8 * 2.0 + 8 * 2.0 - full.compute + 1.0)
    assert full.waits(1) == pytest.approx(full.waits(4))


def test_best_depth():
    between = replace(TIMES, gather=1.2, reduce=1.2)
    assert between.waits(2) < between.waits(1)
    assert best_depth(between) == 2
    assert best_depth(between, room=1) == 1
    assert best_depth(TIMES) == 1
    assert best_depth(replace(TIMES, gather=2.0, reduce=2.0)) == 1


def test_fit_way_is_linear():
    way = fit_way("all_reduce", (4e3, 4e6), (1e-3, 5e-3))
    assert way.seconds(4e3) == pytest.approx(1e-3)
    assert way.seconds(4e6) == pytest.approx(5e-3)
    assert fit_way("all_reduce", (4e3, 4e6), (5e-3, 5e-3)).latency == 5e-3


def test_fastest_way_prefers_the_default():
    usual, slightly, clearly = Way("all_reduce", 1e-3, 1e-9), Way("a", 1e-3, 0.95e-9), Way("b", 2e-3, 0.5e-9)
    assert fastest_way([usual, slightly], 1e9) is usual
    assert fastest_way([usual, slightly, clearly], 1e9) is clearly
    assert fastest_way([usual, slightly, clearly], 1e3) is usual, "latency counts for few bytes"
