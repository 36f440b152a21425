"""Cells of the zoo have the outcomes that are recorded of them, none is wrong, and the page tells of them."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.zoo.__main__ import PAGE, page
from tests.zoo.cells import alone, find, tried
from tests.zoo.record import shortened
from tests.zoo.table import THEMES, count, recorded, rows

# Seconds until a cell counts as hung: a hundred times what most take.
TIMEOUT = 60.0
OUTCOMES = recorded()
ROWS = [(theme, row.name) for theme in THEMES for row in rows(theme)]


ALL = os.environ.get("ZOO") == "all"


def chosen(place: int, layouts: list[str]) -> list[str]:
    """Every third layout of a row, beginning with another one in turn; all of them with ``ZOO=all``."""
    return layouts if ALL else layouts[place % 3 :: 3] or layouts[:1]


def certifies(place: int, outcome: str) -> bool:
    """Each third row; and wherever the certificate may be what refuses. With ``ZOO=all``, everywhere."""
    return ALL or place // 3 % 3 == 0 or outcome != "equal"


@pytest.mark.parametrize(("place", "theme", "name"), [(place, *row) for place, row in enumerate(ROWS)])
def test_row(ranks: Any, place: int, theme: str, name: str) -> None:
    """One module on its layouts."""
    row, expected = find(theme, name), OUTCOMES[theme][name]
    reference = alone(ranks, theme, row)
    found = {
        layout: tried(ranks, theme, row, layout, reference, TIMEOUT, certifies(place, expected[layout]))
        for layout in chosen(place, list(row.layouts))
    }
    differing = {
        layout: f"{text[:400]} instead of {expected[layout]}"
        for layout, text in found.items()
        if shortened(text) != expected[layout]
    }
    assert differing == {}


def test_all_cells_are_recorded() -> None:
    """The record has the cells of the table, no more and no fewer; the table is as large as it promises."""
    table = {theme: {row.name: set(row.layouts) for row in rows(theme)} for theme in THEMES}
    assert {theme: {name: set(row) for name, row in found.items()} for theme, found in OUTCOMES.items()} == table
    numbers = count(OUTCOMES)
    print(numbers)
    assert numbers["modules"] >= 200
    assert numbers["wrong"] == 0


def test_the_page_is_up_to_date() -> None:
    """``python -m tests.zoo`` would change nothing."""
    assert PAGE.read_text() == page()
