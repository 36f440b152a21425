import pytest

from benchmarks.pipeline import CASES, Case, Measured, Waits, goals_of, idle_share, measure, orders_of, rows_of

EVEN = Waits(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.theory(2, 8) is not None], ids=lambda case: case.schedule
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_order_of_the_work_gives_the_formula(case, ranks):
    order = orders_of(case, ranks, 8)
    assert idle_share(order, ranks * case.stages_per_rank, EVEN) == pytest.approx(case.theory(ranks, 8))


def test_zero_bubble_schedules_idle_less_than_1f1b():
    """The first, on one stage per rank, idles (p - 1)(F + I - W) / (m (F + I + W)), arXiv:2401.10241."""
    found = {case: idle_share(orders_of(case, 4, 8), 4 * case.stages_per_rank, EVEN) for case in CASES}
    assert found[Case("interleaved_zero_bubble", 1)] == pytest.approx(3 / 24)
    assert max(found[Case(name, 2)] for name in ("interleaved_zero_bubble", "zbv", "dualpipev")) < 3 / 24


def test_a_circle_is_noticed():
    with pytest.raises(RuntimeError, match="in a circle"):
        idle_share({0: [("B", 0, 0), ("F", 0, 0)]}, 1, EVEN)


def test_pipelines_idle_as_long_as_they_must(ranks):
    """Waits are short, so the engine's own time counts; the test on times is only that none idles less than it can."""
    cases, waits = [Case("1f1b", 1), Case("interleaved_zero_bubble", 1)], Waits(0.004, 0.004, 0.004)
    measured = [Measured(*one) for one in ranks(measure, 2, cases, 4, waits, 1, 2, timeout=60)[0]]
    rows = rows_of(cases, 2, 4, waits, measured)
    assert [row["formula"] for row in rows] == [0.25, None]
    assert all(row["ms"] >= (1 + row["order"]) * 4 * 12 for row in rows)
    assert [goal.name for goal in goals_of(rows)] == ["idle time as a part of the formula's, 1f1b, 2 ranks"]
