from __future__ import annotations

import json

import pytest

from benchmarks import finetune
from benchmarks.finetune import check_losses, goals_of, main, rows_of
from benchmarks.peers.field import OURS
from benchmarks.peers.measure import Measured
from benchmarks.peers.race import Piece


def _measured(step_seconds: float, losses: list[float], mib: int = 1) -> Measured:
    piece = Piece(step_seconds * 2, step_seconds * 4, 0.0, mib * 2**20, (), 0.0)
    return Measured(lines=0, version=None, steps=2, starts=[1.0], pieces=[piece], losses=losses)


@pytest.mark.thorough
def test_all_sides_do_the_same_work(capsys):
    sizes = ["--layers", "1", "--width", "16", "--vocabulary", "300", "--seq-len", "32", "--batch", "2"]
    main([*sizes, "--kinds", "lora", "--pieces", "1", "--steps", "2", "--warm-up", "1", "--threads", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["rows"]) == 3
    assert all(row["tokens_per_s"] > 0 and row["peak_mib"] > 0 for row in result["rows"])
    assert result["goals"][-1]["holds"]


def test_other_losses_and_failed_sides_end_the_benchmark():
    same = {"peer": _measured(0.1, [2.0, 1.0]), OURS: _measured(0.1, [2.0, 1.000001])}
    assert check_losses("lora", same, 2) == pytest.approx(1e-6, rel=0.01)
    for losses, words in (
        ([2.0, 1.0001], "lora, step 1: losses"),
        ([2.0, float("nan")], "step 1"),
        ([2.0], "1 losses"),
    ):
        with pytest.raises(SystemExit, match=words):
            check_losses("lora", {**same, OURS: _measured(0.1, losses)}, 2)
    with pytest.raises(SystemExit, match="lora: peer: no such layout"):
        check_losses("lora", {"peer": Measured(0, None, 2, error="no such layout")}, 2)


def test_ours_is_compared_with_the_fastest_and_the_smallest_peer():
    found = {"slow": _measured(0.4, [], 10), "fast": _measured(0.2, [], 20), OURS: _measured(0.25, [], 15)}
    rows = rows_of("full", found, tokens=100)
    assert [(row["tokens_per_s"], row["ratio"], row["cpu_ratio"]) for row in rows] == [
        (250, 0.5, 0.5),
        (500, 1.0, 1.0),
        (400, 0.8, 0.8),
    ]
    assert [goal.value for goal in goals_of("full", rows, 0.0)] == [0.8, 1.5, 0.0]


def test_what_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setattr(finetune, "find_spec", lambda name: None if name == "peft" else name)
    with pytest.raises(SystemExit):
        main([])
    assert "peft: not installed. Type pip install" in capsys.readouterr().err
