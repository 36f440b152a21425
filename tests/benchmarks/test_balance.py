from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_runs_and_ends_with_json():
    command = [sys.executable, "-m", "benchmarks.balance", "--ranks", "2", "--repeats", "1", "--steps", "9"]
    options = ["--left-out", "7", "--micro-batch", "8", "--milliseconds", "2"]
    ended = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    last = json.loads(ended.stdout.splitlines()[-1])
    equal, auto = last["rows"]
    assert equal["shares"] == "8, 8"
    first, slow = map(int, auto["shares"].split(", "))
    assert first + slow == 16
    assert first > slow
    assert last["difference"] < 1e-5
    assert len(last["goals"]) == 2
