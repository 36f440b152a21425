from __future__ import annotations

from typing import Any

from tests.benchmarks.command import result_of


def test_it_runs_and_ends_with_json(ranks: Any) -> None:
    sizes = ["--ranks", "2", "--repeats", "1", "--steps", "9", "--left-out", "7", "--micro-batch", "8"]
    last = result_of("-c", "from benchmarks.balance import main; main()", *sizes, "--milliseconds", "2")
    equal, auto = last["rows"]
    assert equal["shares"] == "8, 8"
    first, slow = map(int, auto["shares"].split(", "))
    assert first + slow == 16
    assert first > slow
    assert last["difference"] < 1e-5
    assert len(last["goals"]) == 2
