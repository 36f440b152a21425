"""The page of libraries is made from the recorded outcomes, and environments have their versions."""

from __future__ import annotations

from pathlib import Path

from tests.libraries.__main__ import PAGE, page
from tests.libraries.base import LOADED
from tests.libraries.environments import LIBRARIES, SHARED
from tests.libraries.table import recorded
from tests.zoo.table import count


def test_page_is_up_to_date() -> None:
    """``python -m tests.libraries`` would change nothing."""
    assert PAGE.read_text() == page()


def test_no_outcome_is_wrong() -> None:
    numbers = count(recorded())
    assert numbers["wrong"] == 0
    assert numbers["modules"] > 0


def test_every_library_with_rows_is_recorded() -> None:
    """A file of rows without outcomes was never run."""
    files = {path.stem for path in Path(__file__).parent.glob("*.py")} & LIBRARIES.keys()
    assert recorded().keys() == files


def test_single_is_equal_wherever_it_is_tried() -> None:
    """One process of ours is Lightning's; what it refuses to save or load is another matter."""
    rows = {name: row for found in recorded().values() for name, row in found.items() if not name.endswith(LOADED)}
    cells = [row["single"] for row in rows.values() if "single" in row]
    assert set(cells) == {"equal"}


def test_pins_have_the_library_and_what_is_shared() -> None:
    """Else an installation could replace torch or Lightning."""
    for library in recorded():
        pinned = {line.partition("==")[0] for line in LIBRARIES[library].pins.read_text().splitlines()}
        assert pinned >= {LIBRARIES[library].name, *SHARED}
