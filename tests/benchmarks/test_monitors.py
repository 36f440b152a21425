from __future__ import annotations

from benchmarks.monitors import goals_of


def test_the_goal_is_a_part_of_a_step_of_50_ms() -> None:
    rows = [{"monitor": name, "us_per_step": cost} for name, cost in (("none", 0.0), ("default", 499.0), ("x", 501.0))]
    assert [goal.holds for goal in goals_of(rows)] == [True, False]
