"""Zoo cells have their recorded outcomes, and the documented table is made from these."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.zoo.__main__ import PAGE, page
from tests.zoo.cells import LAYOUTS, SINGLE, find, resumed, rows, tried
from tests.zoo.record import shortened
from tests.zoo.table import THEMES, count, recorded

# Seconds until a cell counts as hung: a hundred times what most take.
TIMEOUT = 60.0
OUTCOMES = recorded()
ALL = os.environ.get("ZOO") == "all"
# In these themes each row is a model family of its own; `make test` trains each.
FAMILIES = ("families", "pictures")


def sample() -> dict[tuple[str, str], dict[str, bool]]:
    """Return the cells to train: ``(theme, row) -> {layout: with certificate}``.

    All of them with ``ZOO=all``. Otherwise one layout of every family and of every ninth other row, drawn with a
    fixed seed: the layout and kind of outcome that was drawn least so far. A certificate takes longer than the steps:
    it is on where it may be what refuses, and once per layout.
    """
    table = [(theme, row) for theme in THEMES for row in rows(theme)]
    if ALL:
        return {(theme, row.name): dict.fromkeys(row.layouts, True) for theme, row in table}
    random.Random(21).shuffle(table)
    has = Counter(layout for _, row in table for layout in row.layouts)
    others = [(theme, row) for theme, row in table if theme not in FAMILIES]
    others.sort(key=lambda each: min(has[layout] for layout in each[1].layouts) >= 20)  # all rows of rare layouts
    families = [(theme, row) for theme, row in table if theme in FAMILIES]
    drawn: Counter[tuple[str, bool]] = Counter()
    found = {}
    for theme, row in [*others[: len(others) // 9], *families]:
        trains = {layout: OUTCOMES[theme][row.name][layout] == "equal" for layout in row.layouts}
        layout = min(trains, key=lambda each: (drawn[each, trains[each]], has[each]))
        found[theme, row.name] = {layout: not trains[layout] or not drawn[layout, True]}
        drawn[layout, trains[layout]] += 1
    return found


SAMPLE = sample()


@pytest.mark.parametrize(("theme", "name"), sorted(SAMPLE))
def test_row(ranks: Any, theme: str, name: str) -> None:
    row, expected = find(theme, name), OUTCOMES[theme][name]
    found = tried(ranks, theme, row, SAMPLE[theme, name], TIMEOUT)
    differing = {
        layout: f"{text[:400]} instead of {expected[layout]}"
        for layout, text in found.items()
        if shortened(text) != expected[layout]
    }
    assert differing == {}


# Rows whose state a checkpoint does not have, with where it is.
NOT_RESUMED = {
    **dict.fromkeys(("counts steps in Python", "dropped blocks"), "a number of Python"),
    **dict.fromkeys(
        ("load_state_dict as fit starts", "sets weights at the start of fit", "sets weights at the start of training"),
        "user code writes weights whenever training starts",
    ),
    "AveragedModel": "a module that is not registered",
    **dict.fromkeys(
        (
            *("accuracy", "F1, AUROC, calibration", "mean and maximum", "sum", "confusion matrix", "all values"),
            *("a collection", "a metric of one's own", "torchmetrics"),
        ),
        "non-persistent torchmetrics",
    ),
    **dict.fromkeys(
        (
            *("a stream", "a sized stream", "a stream split by rank", "a stream split by environment"),
            *("a stream split by worker", "a stream of batches"),
        ),
        "a stream without a state starts anew",
    ),
}


# Steps of a resumed run: an epoch of three, and two more.
RESUMED_STEPS = 5


def pairs() -> list[tuple[str, str, str, str, int]]:
    """Draw two layouts of each row, one to save under and one to resume under, and the step to save."""
    generator, found = random.Random(0), []
    for theme in THEMES:
        for row in rows(theme):
            trains = [layout for layout in row.layouts if OUTCOMES[theme][row.name][layout] == "equal"]
            if trains and row.steps > 1 and row.name not in NOT_RESUMED:
                saved, resumed_under = generator.sample([*trains, SINGLE], 2)
                most = row.steps if "max_steps" in row.trainer() else RESUMED_STEPS
                found.append((theme, row.name, saved, resumed_under, generator.randrange(1, most)))
    return found


@pytest.mark.sample(8)
@pytest.mark.parametrize(("theme", "name", "saved", "resumed_under", "after"), pairs())
def test_resumes_under_another_layout(
    ranks: Any, tmp_path: Path, theme: str, name: str, saved: str, resumed_under: str, after: int
) -> None:
    row = find(theme, name)
    steps = max(RESUMED_STEPS, row.steps)
    assert resumed(ranks, theme, row, (saved, resumed_under), str(tmp_path), TIMEOUT, after, steps) == "equal"


def test_unsharded_optimizer_states_resume(ranks: Any, tmp_path: Path) -> None:
    """One rank owns the state of each parameter that is stepped whole."""
    row = find("optimizers", "Muon by hand")
    assert resumed(ranks, "optimizers", row, ("zero2", "zero2"), str(tmp_path), TIMEOUT) == "equal"


def test_sample_covers_layouts_families_and_refusals() -> None:
    cells = [(theme, name, layout) for (theme, name), layouts in SAMPLE.items() for layout in layouts]
    certified = {layout for layouts in SAMPLE.values() for layout, is_certified in layouts.items() if is_certified}
    assert {layout for _, _, layout in cells} == certified == LAYOUTS.keys()
    assert {theme for theme, _, _ in cells} == THEMES.keys()
    assert {(theme, name) for theme, name, _ in cells} >= {(t, row.name) for t in FAMILIES for row in rows(t)}
    assert sum(OUTCOMES[theme][name][layout] != "equal" for theme, name, layout in cells) >= 30


def test_all_cells_are_recorded_and_none_is_wrong() -> None:
    table = {theme: {row.name: set(row.layouts) for row in rows(theme)} for theme in THEMES}
    assert {theme: {name: set(row) for name, row in found.items()} for theme, found in OUTCOMES.items()} == table
    numbers = count(OUTCOMES)
    assert numbers["modules"] >= 200
    assert numbers["wrong"] == 0


def test_page_is_up_to_date() -> None:
    """``python -m tests.zoo`` would change nothing."""
    assert PAGE.read_text() == page()
