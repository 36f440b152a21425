import pytest

from tests.benchmarks.command import result_of


@pytest.mark.thorough
def test_it_runs_and_ends_with_json():
    last = result_of("-m", "benchmarks.watching", "--block", "3", "--pairs", "2")
    assert [(row["rank"], row["clock"]) for row in last["rows"]] == [
        (rank, clock) for rank in (0, 1) for clock in ("wall", "processor")
    ]
    assert all(row["ratio"] > 0 and row["ms_per_step_with"] > 0 for row in last["rows"])
    assert last["replica_check"]["held_mib"] > 5
    assert len(last["goals"]) == 1
