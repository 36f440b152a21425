from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.warm import warm_run

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_it_runs_and_ends_with_json():
    command = [sys.executable, "-m", "benchmarks.watching", "--block", "3", "--pairs", "2"]
    ended = warm_run(command, cwd=ROOT, capture_output=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    last = json.loads(ended.stdout.splitlines()[-1])
    assert [(row["rank"], row["clock"]) for row in last["rows"]] == [
        (rank, clock) for rank in (0, 1) for clock in ("wall", "processor")
    ]
    assert all(row["ratio"] > 0 and row["ms_per_step_with"] > 0 for row in last["rows"])
    assert last["replica_check"]["held_mib"] > 5
    assert len(last["goals"]) == 1
