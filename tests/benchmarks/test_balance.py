from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.warm import warm_run

ROOT = Path(__file__).parents[2]


def test_it_runs_and_ends_with_json(ranks: Any) -> None:
    run = "from benchmarks.balance import main; main()"
    command = [sys.executable, "-c", run, "--ranks", "2", "--repeats", "1", "--steps", "9"]
    options = ["--left-out", "7", "--micro-batch", "8", "--milliseconds", "2"]
    ended = warm_run([*command, *options], cwd=ROOT, capture_output=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    last = json.loads(ended.stdout.splitlines()[-1])
    equal, auto = last["rows"]
    assert equal["shares"] == "8, 8"
    first, slow = map(int, auto["shares"].split(", "))
    assert first + slow == 16
    assert first > slow
    assert last["difference"] < 1e-5
    assert len(last["goals"]) == 2
