"""Every cell of the zoo has the outcome that is recorded of it, and the page tells of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.zoo.__main__ import PAGE, page
from tests.zoo.cells import alone, find, tried
from tests.zoo.record import shortened
from tests.zoo.table import THEMES, count, recorded, rows

# Seconds until a cell counts as hung: a hundred times what most take.
TIMEOUT = 60.0
OUTCOMES = recorded()
CELLS = {(theme, row.name): OUTCOMES.get(theme, {}).get(row.name, {}) for theme in THEMES for row in rows(theme)}
WRONG = [(*key, layout) for key, row in CELLS.items() for layout, outcome in row.items() if outcome.startswith("wrong")]


@pytest.mark.parametrize(("theme", "name"), list(CELLS))
def test_row(ranks: Any, theme: str, name: str) -> None:
    """One module under all its layouts but those where it is known to go wrong."""
    row, reference = find(theme, name), alone(ranks, theme, find(theme, name))
    expected = {layout: text for layout, text in CELLS[theme, name].items() if not text.startswith("wrong")}
    found = {layout: tried(ranks, theme, row, layout, reference, TIMEOUT) for layout in expected}
    differing = {
        layout: f"{text[:400]} instead of {expected[layout]}"
        for layout, text in found.items()
        if shortened(text) != expected[layout]
    }
    assert differing == {}


@pytest.mark.xfail(strict=True, reason="known to go wrong; see outcomes.json")
@pytest.mark.parametrize(("theme", "name", "layout"), WRONG)
def test_wrong_cell(ranks: Any, theme: str, name: str, layout: str) -> None:
    """A cell that goes wrong; once it does not, record it anew."""
    row = find(theme, name)
    assert not tried(ranks, theme, row, layout, alone(ranks, theme, row), TIMEOUT).startswith("wrong")


def test_all_cells_are_recorded() -> None:
    """The record has the cells of the table, no more and no fewer; the table is as large as it promises."""
    table = {theme: {row.name: set(row.layouts) for row in rows(theme)} for theme in THEMES}
    assert {theme: {name: set(row) for name, row in found.items()} for theme, found in OUTCOMES.items()} == table
    numbers = count(OUTCOMES)
    print(numbers)
    assert numbers["modules"] >= 200
    assert numbers["wrong"] == len(WRONG)


def test_the_page_is_up_to_date() -> None:
    """``python -m tests.zoo`` would change nothing."""
    assert PAGE.read_text() == page()
