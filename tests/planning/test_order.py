"""Order of a pipeline's passes, and passes in flight."""

import pytest

from trainwright.planning.memory.peak import BACKWARD, FORWARD, actions_of, in_flight, passes_of


@pytest.mark.parametrize(("schedule", "stages"), [("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("looped_bfs", 2)])
@pytest.mark.parametrize(("ranks", "parts"), [(2, 4), (2, 6), (4, 4), (4, 8)])
def test_passes_in_flight(schedule: str, stages: int, ranks: int, parts: int) -> None:
    for rank in range(ranks):
        actions = actions_of(schedule, ranks, stages, parts, rank)
        for kind in (FORWARD, BACKWARD):
            passes = {(each.stage, each.part) for each in actions if each.kind == kind}
            assert passes == {(rank + ranks * n, part) for n in range(stages) for part in range(parts)}
        assert len(actions) == 2 * stages * parts
        most = max(each.live for each in passes_of(schedule, ranks, stages, parts, rank))
        assert most == in_flight(schedule, ranks, stages, parts, rank)
