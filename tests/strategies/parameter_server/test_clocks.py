"""Who may go on, by itself."""

import random

import pytest

from trainwright.strategies.parameter_server.server.clocks import Clocks, Rules


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_nobody_is_ever_let_go_beyond_the_bound(bound):
    draw, clocks, let_go = random.Random(bound), Clocks(bound), 0
    for worker in range(4):
        clocks.join(worker)
    for _ in range(2000):
        worker = draw.randrange(4)
        what = draw.random()
        if what < 0.02:
            clocks.leave(worker)
        elif worker not in clocks.workers:
            assert clocks.join(worker) == clocks.slowest
        elif clocks.may_go(worker):
            assert clocks.clock(worker) - clocks.slowest <= bound
            clocks.tick(worker)
            spread = max(map(clocks.clock, clocks.training)) - clocks.slowest
            assert spread <= bound + 1  # one step has been made, and the next is not granted yet
            let_go += 1
    assert let_go > 200


def test_without_a_bound_nobody_waits():
    clocks = Clocks(Rules("async").bound)
    clocks.join(0)
    clocks.join(1)
    for _ in range(1000):
        assert clocks.may_go(0)
        clocks.tick(0)
    assert (clocks.clock(0), clocks.slowest) == (1000, 0)


def test_the_dead_and_those_who_wait_for_all_hold_up_nobody():
    clocks = Clocks(Rules("ssp", 1).bound)
    for worker in range(3):
        clocks.join(worker)
    clocks.tick(0)
    clocks.tick(0)
    assert not clocks.may_go(0)
    clocks.leave(1)
    assert not clocks.may_go(0)
    clocks.wait(2)
    assert clocks.may_go(0)
    assert clocks.join(1) == 2
    assert not clocks.have_met
    clocks.wait(0)
    clocks.wait(1)
    assert clocks.have_met
    clocks.go_on()
    assert [clocks.clock(worker) for worker in clocks.workers] == [2, 2, 2]
    assert clocks.training == (0, 1, 2)
