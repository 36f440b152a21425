"""Bounds on the classes of strategies and on the files of a step."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from benchmarks.structure import WALKS, code_lines, own_bases, strategy_class, strategy_counts, walk
from trainwright.core.run.peers import Peers, Service
from trainwright.strategies.averaging.replica_averaging import Averaging, ReplicaAveraging
from trainwright.strategies.compose.parts.mixed_placement import ServedByRanks
from trainwright.strategies.contract.collectives.data import DataCollectives
from trainwright.strategies.contract.collectives.ranks import Ranks
from trainwright.strategies.contract.part import Replicas, Tables
from trainwright.strategies.contract.registry import strategy_names
from trainwright.strategies.local_updates.strategy import OuterReplicas
from trainwright.strategies.parameter_server.peers import Servers, Workers

MOST_BASES = 3
# Of public methods, those that override Lightning's do not count.
MOST_PUBLIC = 25
PARTS = {
    *("averaging", "tables", "state", "replicas", "ranks", "measures", "peers", "service", "certified"),
    *("_engines", "_assembly", "_wholes"),
}

PAIRS: list[tuple[type, type]] = [
    (Averaging, ReplicaAveraging),
    (Tables, ServedByRanks),
    (Replicas, OuterReplicas),
    (Ranks, DataCollectives),
    (Peers, Workers),
    (Service, Servers),
]


@pytest.mark.parametrize("name", strategy_names())
def test_strategies_are_composed_rather_than_inherited(name: str) -> None:
    found = strategy_counts()[name]
    assert found["own bases"] <= MOST_BASES, own_bases(strategy_class(name))
    assert found["public"] <= MOST_PUBLIC


@pytest.mark.parametrize("name", strategy_names())
def test_parts_are_never_compared_with_none(name: str) -> None:
    cls = strategy_class(name)
    for owner in (cls, *own_bases(cls)):
        module = inspect.getmodule(owner)
        assert module is not None
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr in PARTS:
                ends = [each for each in node.comparators if isinstance(each, ast.Constant) and each.value is None]
                assert not ends, f"{owner.__name__}, line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(("null", "part"), PAIRS)
def test_null_objects_have_the_interface_of_parts(null: type, part: type) -> None:
    assert issubclass(part, null)
    asked = {name for name in vars(null) if not name.startswith("_")}
    assert asked
    for name in asked:
        own, theirs = vars(null)[name], inspect.getattr_static(part, name)
        if inspect.isfunction(own):
            assert inspect.signature(own).parameters.keys() == inspect.signature(theirs).parameters.keys()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "most"), [("ddp", 8), ("zero3", 12), ("pipeline=2", 24)])
def test_a_step_passes_through_few_files(ranks: Any, name: str, most: int) -> None:
    strategy, options = WALKS[name]
    found = ranks(walk, 2, strategy, {**options, "certificate": "off"})[0]
    assert "trainer/loop/epoch.py" in found.files
    assert len(found.files) <= most, found.files


def test_blank_comment_and_docstring_lines_are_not_counted(tmp_path: Path) -> None:
    text = ['"""A docstring', 'of two lines."""', "", "# a comment", "value = (", "    1", ")", "", "", "def read():"]
    file = tmp_path / "counted.py"
    file.write_text("\n".join([*text, '    """Free."""', "    return value", ""]))
    assert code_lines(file) == 5
