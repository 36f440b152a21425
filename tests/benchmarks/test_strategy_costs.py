"""Bytes held and sent by strategies, against their formulas, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import benchmarks
from benchmarks.strategy_costs import COSTS, PAGE, for_people, measure_all, page_of, possible_on, write_page
from trainwright.recipes.gpt.model import GPTConfig

SMALL = GPTConfig(layers=2, dim=64, heads=4, seq_len=32, tied_head=False)
# What else is sent does not grow with the number of blocks; rows of an embedding that no token touched are not pushed.
SENT = {"context, ring": (0.99, 1.3), "expert": (0.9, 1.15), "parameter_server": (0.8, 1.2)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("precision", "names"),
    [
        ("32", possible_on(2)),
        ("bf16-mixed", possible_on(2)),
        ("16-mixed", ["zero1", "zero3", "tensor", "context, ring"]),
    ],
)
def test_held_and_sent_bytes_match_the_formulas(ranks: Any, precision: str, names: list[str]) -> None:
    assert set(COSTS) - set(possible_on(2)) == {"hybrid: zero3 x tensor 2", "hybrid: zero3 x pipeline"}
    rows = ranks(measure_all, 2, names, SMALL, 4, [precision], timeout=120)[0]
    assert [row["strategy"] for row in rows] == names
    for row in rows:
        assert 0.99 < row["held ratio"] < 1.02, row
        least, most = SENT.get(row["strategy"], (0.99, 1.01))
        assert least < row["sent ratio"] < most, row
        assert for_people(row)["held"] == round(row["held"] / 1024, 1)


HYBRIDS = [name for name in COSTS if name.startswith("hybrid")]


@pytest.mark.thorough
def test_hybrids_send_what_the_formulas_say(ranks: Any) -> None:
    for row in ranks(measure_all, 4, HYBRIDS, SMALL, 4, ["bf16-mixed"], timeout=120)[0]:
        assert 0.99 < row["sent ratio"] < 1.01, row


def test_the_page_shows_what_was_measured(tmp_path: Path) -> None:
    rows = json.loads((Path(benchmarks.__file__).parent / "results" / "strategy_costs_cpu.json").read_text())["rows"]
    assert page_of(rows) in PAGE.read_text()
    copy = tmp_path / "page.md"
    copy.write_text(PAGE.read_text().replace("3,849", "0"))
    write_page(rows, copy)
    assert copy.read_text() == PAGE.read_text()
