"""Clocks of workers, and the assignment of rows to servers."""

import math
import random

import pytest

from trainwright.strategies.parameter_server.options import ParameterServerOptions
from trainwright.strategies.parameter_server.server.clocks import Clocks
from trainwright.strategies.parameter_server.server.sharder import share_out

SHAPES = [(1000, 8), (30, 10), (10,), (), (200, 3), (7, 0)]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_worker_exceeds_the_bound(bound):
    draw, clocks, steps = random.Random(bound), Clocks(bound), 0
    for worker in range(4):
        clocks.join(worker)
    for _ in range(2000):
        worker = draw.randrange(4)
        what = draw.random()
        if what < 0.02:
            clocks.leave(worker)
        elif worker not in clocks.workers:
            assert clocks.join(worker) == clocks.slowest
        elif clocks.may_proceed(worker):
            assert clocks.clock(worker) - clocks.slowest <= bound
            clocks.tick(worker)
            spread = max(map(clocks.clock, clocks.training)) - clocks.slowest
            assert spread <= bound + 1  # the next step is not granted yet
            steps += 1
    assert steps > 200


def test_asynchronous_workers_never_wait():
    clocks = Clocks(ParameterServerOptions(consistency="async").bound)
    clocks.join(0)
    clocks.join(1)
    for _ in range(1000):
        assert clocks.may_proceed(0)
        clocks.tick(0)
    assert (clocks.clock(0), clocks.slowest) == (1000, 0)


def test_lost_and_waiting_workers_block_no_one():
    clocks = Clocks(ParameterServerOptions(consistency="ssp", staleness=1).bound)
    for worker in range(3):
        clocks.join(worker)
    clocks.tick(0)
    clocks.tick(0)
    assert not clocks.may_proceed(0)
    clocks.leave(1)
    assert not clocks.may_proceed(0)
    clocks.wait(2)
    assert clocks.may_proceed(0)
    assert clocks.join(1) == 2
    assert not clocks.all_waiting
    clocks.wait(0)
    clocks.wait(1)
    assert clocks.all_waiting
    clocks.release()
    assert [clocks.clock(worker) for worker in clocks.workers] == [2, 2, 2]
    assert clocks.training == (0, 1, 2)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_rows_are_partitioned(servers, whole):
    held = share_out(SHAPES, servers, whole=whole)
    for index, shape in enumerate(SHAPES):
        pieces = sorted((p.start, p.stop) for slices in held for p in slices if p.parameter == index)
        assert [a for a, _ in pieces[1:]] == [b for _, b in pieces[:-1]]
        assert (pieces[0][0], pieces[-1][1]) == (0, shape[0] if shape else 1)
        assert len(pieces) == 1 or not whole


def test_servers_are_balanced() -> None:
    sizes = [sum(piece.numel for piece in slices) for slices in share_out(SHAPES, 3)]
    assert max(sizes) <= 1.25 * sum(map(math.prod, SHAPES)) / 3
    with pytest.raises(ValueError, match="at most servers=1"):
        share_out([(1, 5)], 2)
