from __future__ import annotations

import json

from benchmarks.alternate import alternate
from benchmarks.report import Goal, finish, table_of


def test_goals_know_their_direction():
    assert Goal("overhead", 99.0, 100.0).holds
    assert not Goal("overhead", 101.0, 100.0).holds
    assert Goal("ratio", 0.99, 0.98, at_least=True).holds
    assert not Goal("ratio", 0.97, 0.98, at_least=True).holds


def test_the_last_line_is_json(capsys):
    rows = [{"side": "ours", "seconds": 1.5, "note": None}]
    finish("example", [table_of("An example", rows)], [Goal("seconds", 1.5, 1.0)], {"rows": rows})
    lines = capsys.readouterr().out.splitlines()
    last = json.loads(lines[-1])
    assert last["benchmark"] == "example"
    assert last["rows"] == rows
    assert last["goals"] == [{"name": "seconds", "value": 1.5, "limit": 1.0, "at_least": False, "holds": False}]
    assert any("FAILS  seconds" in line for line in lines)
    assert any("ours" in line for line in lines)


def test_sides_alternate_and_each_begins_a_round():
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    taken = alternate({name: lambda name=name: side(name) for name in "ab"}, 2, str)
    assert order == ["a", "b", "b", "a"]
    assert taken == {"a": [1.0, 4.0], "b": [2.0, 3.0]}
