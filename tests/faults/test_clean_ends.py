"""However a run ends: nobody hangs, nothing is left, and what is told is the first cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.failing_hooks import OF_CALLBACK, OF_MODULE, end_of_fit

CASES = [("module", hook) for hook in OF_MODULE] + [("callback", hook) for hook in OF_CALLBACK]


@pytest.mark.parametrize(("of", "hook"), CASES, ids=[f"{of}-{hook}" for of, hook in CASES])
def test_a_rank_that_fails_in_a_hook_keeps_nobody_waiting(
    ranks: Callable[..., list[Any]], tmp_path: Path, of: str, hook: str
) -> None:
    ends = ranks(end_of_fit, 2, "ddp", {}, of, hook, str(tmp_path), timeout=30)
    [failing, other] = sorted(ends, key=lambda end: "Boom" not in end)
    assert failing == f"Boom: in {hook}", ends
    assert "Boom" not in other


PLAN = {"last": ["decoder.temperature"]}
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("zero3", 2, {}),
    ("pipeline", 2, {"pipeline": 2, "plan": PLAN}),
    ("hybrid", 4, {"pipeline": 2, "shard": 2, "plan": PLAN}),
]


@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "state_dict"]
)
@pytest.mark.parametrize(("strategy", "count", "options"), LAYOUTS, ids=[layout[0] for layout in LAYOUTS])
def test_it_keeps_nobody_waiting_in_other_layouts(
    ranks: Callable[..., list[Any]], tmp_path: Path, strategy: str, count: int, options: dict[str, Any], hook: str
) -> None:
    *others, failing = ends = ranks(end_of_fit, count, strategy, options, "callback", hook, str(tmp_path), timeout=30)
    assert failing == f"Boom: in {hook}", ends
    assert not any("Boom" in other for other in others)
