from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from tests.benchmarks.command import result_of


def test_it_runs_and_ends_with_json(ranks: Any) -> None:
    last = result_of("-m", "benchmarks.overhead", "--steps", "20", "--repeats", "1")
    sides = {"bare loop", "Lightning Trainer", "Lightning Fabric", "trainwright.Trainer"}
    assert {row["side"] for row in last["rows"]} == sides
    assert {row["case"] for row in last["rows"]} == {"logs nothing", "logs once a step"}
    assert all(row["cpu_us_per_step"] > 0 and row["wall_us_per_step"] > 0 for row in last["rows"])
    assert all(row["cpu_us_over_bare"] == 0 for row in last["rows"] if row["side"] == "bare loop")
    assert len(last["goals"]) == 2
    assert "GPU available" not in last["printed"]


@pytest.mark.parametrize("name", ["overhead", "throughput", "startup", "memory"])
def test_help_says_what_is_measured(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"python -m benchmarks.{name}" in printed
    assert "default" in printed
