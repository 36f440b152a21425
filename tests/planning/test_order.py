"""Order of a pipeline's passes, and passes in flight."""

import pytest

from trainwright.planning.memory.peak import BACKWARD, FORWARD, actions_of, in_flight, passes_of


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"])
@pytest.mark.parametrize(("ranks", "parts"), [(2, 4), (4, 8)])
def test_passes_in_flight(schedule: str, ranks: int, parts: int) -> None:
    stages = 2 if schedule in ("interleaved_1f1b", "looped_bfs") else 1
    for rank in range(ranks):
        computed = in_flight(schedule, ranks, stages, parts, rank)
        if stages == 2:
            assert computed == max(each.live for each in passes_of(schedule, ranks, stages, parts, rank))
        assert computed == {"gpipe": parts, "1f1b": min(parts, ranks - rank)}.get(schedule, computed)


ORDERS = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("looped_bfs", 2)]


@pytest.mark.parametrize(("schedule", "stages"), ORDERS)
@pytest.mark.parametrize(("ranks", "parts"), [(2, 6), (4, 4), (4, 8)])
def test_actions(schedule: str, stages: int, ranks: int, parts: int) -> None:
    for rank in range(ranks):
        actions = actions_of(schedule, ranks, stages, parts, rank)
        for kind in (FORWARD, BACKWARD):
            passes = {(each.stage, each.part) for each in actions if each.kind == kind}
            assert passes == {(rank + ranks * n, part) for n in range(stages) for part in range(parts)}
        assert len(actions) == 2 * stages * parts
        assert most_live(actions) == in_flight(schedule, ranks, stages, parts, rank)


def most_live(actions: object) -> int:
    live = most = 0
    for each in actions:  # type: ignore[attr-defined]
        live += 1 if each.kind == FORWARD else -1
        most = max(most, live)
    return most
