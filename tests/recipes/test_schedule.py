import math

import pytest

from trainwright.recipes.language_model import learning_rate_factor


def test_schedule_has_three_parts() -> None:
    factors = [learning_rate_factor(step, 4, 20, 0.1) for step in range(30)]
    assert factors[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert factors[4] == 1.0
    assert all(a > b for a, b in zip(factors[4:20], factors[5:21], strict=True))
    assert factors[12] == pytest.approx(0.55)
    assert factors[20:] == [0.1] * 10


def test_no_warm_up_and_no_end() -> None:
    assert learning_rate_factor(0, 0, 10, 0.0) == 1.0
    assert learning_rate_factor(10**9, 5, math.inf, 0.1) == 1.0


def test_run_shorter_than_its_warm_up() -> None:
    factors = [learning_rate_factor(step, 20, 10, 0.1) for step in range(25)]
    assert factors[:20] == sorted(factors[:20])
    assert factors[20:] == [0.1] * 5
