from math import exp, expm1

import pytest

from trainwright.checkpoint.write.interval import AutoInterval, TimedSteps, young_daly


def lost_time(interval: float, cost: float, mtbf: float) -> float:
    """Daly's exact expected time per unit of work (equation 13, restart time 0), which the formula minimizes."""
    return mtbf * exp(0.0) * expm1((interval + cost) / mtbf) / interval


@pytest.mark.parametrize(("cost", "mtbf"), [(1.0, 3600.0), (60.0, 3600.0), (300.0, 86400.0), (500.0, 1500.0)])
def test_interval_minimizes_lost_time(cost, mtbf):
    best = min(lost_time(1.0 + step * mtbf / 2000, cost, mtbf) for step in range(4000))
    assert lost_time(young_daly(cost, mtbf), cost, mtbf) <= best * 1.001


def test_known_values():
    assert young_daly(2.0, 10000.0) == pytest.approx(200.0 * (1 + 0.01 / 3 + 0.0001 / 9) - 2.0)
    assert young_daly(50.0, 20.0) == 20.0
    assert young_daly(0.0, 20.0) == 0.0


@pytest.mark.parametrize(("cost", "mtbf"), [(-1.0, 5.0), (1.0, 0.0)])
def test_invalid_values_are_refused(cost, mtbf):
    with pytest.raises(ValueError, match="more than 0 seconds between failures"):
        young_daly(cost, mtbf)


def test_interval_adapts_to_save_cost():
    auto = AutoInterval(mtbf_seconds=3600.0, first=60.0, least=10.0, most=600.0)
    assert auto.seconds == 60.0
    auto.saved(2.0)
    assert auto.seconds == young_daly(2.0, 3600.0)
    auto.saved(4.0)
    assert auto.seconds == young_daly(3.0, 3600.0)


def test_interval_is_bounded():
    auto = AutoInterval(mtbf_seconds=3600.0, least=10.0, most=600.0)
    auto.saved(0.0)
    assert auto.seconds == 10.0
    auto.saved(0.0, written_seconds=45.0)  # the next one would have to wait for this one
    assert auto.seconds == 90.0
    auto.saved(1000.0)
    assert auto.seconds == 600.0


class Run:
    """Steps that take a known time on a clock of their own."""

    def __init__(self, seconds: float) -> None:
        self.now = 100.0
        self.looks = 0
        self.interval = seconds
        self.steps = TimedSteps(lambda: self.interval, self.agree, lambda: self.now)

    def agree(self, answer):
        self.looks += 1
        return answer

    def train(self, durations, start=0):
        """Steps at which a save was due."""
        due = []
        self.steps.restart(start)
        for step, seconds in enumerate(durations, start + 1):
            self.now += seconds
            if self.steps.is_due(step):
                due.append(step)
                self.steps.restart(step)
        return due


def test_saves_are_on_time_with_few_checks():
    run = Run(seconds=100.0)
    assert run.train([0.1] * 5000, start=7) == [1007, 2007, 3007, 4007, 5007]
    assert run.looks <= 5 * 14


def test_slow_steps():
    assert Run(seconds=10.0).train([4.0] + [0.01] * 700) == [601]
    assert Run(seconds=1.0).train([5.0] * 4) == [1, 2, 3, 4]


def test_slowdown_is_noticed():
    run = Run(seconds=100.0)
    due = run.train([0.1] * 100 + [10.0] * 200)
    # 10 s have passed after 100 steps; it was thought that 64 more steps might be made before the next look.
    assert due[0] <= 130
    assert due[1] - due[0] == 10


def test_first_rank_decides():
    steps = TimedSteps(lambda: 1e9, lambda answer: (True, 5), lambda: 0.0)
    steps.restart(0)
    assert steps.is_due(1)
    assert [steps.is_due(step) for step in (2, 4, 5)] == [False, False, True]
