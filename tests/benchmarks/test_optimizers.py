from __future__ import annotations

from typing import Any

import pytest

from benchmarks.optimizers import LAYOUTS, measure, rows_of
from trainwright.recipes.gpt.model import GPTConfig


@pytest.mark.thorough
def test_a_sharded_optimizer_holds_half_and_loses_nothing(ranks: Any) -> None:
    config = GPTConfig(layers=2, dim=32, heads=2, seq_len=8)
    found = ranks(measure, 2, "Muon", config, 3, 1)[0]
    rows = rows_of("Muon", found, found["ddp"]["losses"])
    assert [row["layout"] for row in rows] == list(LAYOUTS)
    assert all(row["from_one_process"] < 1e-4 and row["step_ms"] > 0 for row in rows), rows
    assert rows[0]["state_ratio"] == 1
    assert all(row["state_ratio"] < 0.7 for row in rows[1:]), rows
