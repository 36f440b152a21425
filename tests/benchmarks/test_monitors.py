from __future__ import annotations

import lightning.pytorch as pl
import pytest

from benchmarks import monitors
from benchmarks.monitors import HookTime, goals_of, taken


def test_the_goal_is_a_part_of_a_step_of_50_ms() -> None:
    rows = [{"monitor": name, "us_in_hooks": cost} for name, cost in (("none", 0.0), ("default", 499.0), ("x", 501.0))]
    assert [goal.holds for goal in goals_of(rows)] == [True, False]


def test_one_time_costs_are_separated() -> None:
    # 1 s a step, 6 s more at the end of a window; a slow beginning, a longer first window, and 3 s at the end.
    lasts = [1.0] * 150
    lasts[0], lasts[20], lasts[49] = 11.0, 31.0, 7.0 + 4.0
    lasts[99] = lasts[149] = 7.0
    ends = [sum(lasts[: number + 1]) for number in range(150)]
    found = taken(0.0, ends, ends[-1] + 3.0)
    assert (found.step, found.window, found.mean) == (1.0, 6.0, 1.12)
    assert found.per_step == 1.12
    assert found.once == pytest.approx(10 + 30 + 4 + 3)


def test_hooks_of_steps_are_timed_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watching(pl.Callback):
        def on_train_batch_end(self, *args: object) -> None:
            clock[0] += 2.0

        def on_fit_start(self, *args: object) -> None:
            clock[0] += 5.0

    clock = [0.0]
    monkeypatch.setattr(monitors.time, "thread_time", lambda: clock[0])
    watching = Watching()
    found = HookTime([watching])
    watching.on_fit_start(None, None)
    watching.on_train_batch_end(None, None, None, None, 0)
    watching.on_train_batch_start(None, None, None, 0)  # not its own
    assert found.seconds == 2.0
