"""Write docs/libraries.md from the recorded outcomes: ``python -m tests.libraries``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.libraries.base import LOADED, SHUFFLED
from tests.libraries.environments import LIBRARIES
from tests.libraries.table import beyond_single, recorded
from tests.zoo.table import count

PAGE = Path(__file__).parents[2] / "docs" / "libraries.md"
HEAD = """# Libraries

{modules} modules of {libraries} libraries, unmodified, on small generated data: losses, logged values, parameters,
validation and predictions are compared with Lightning's Trainer on one process; some also shuffled, and with
`load_from_checkpoint`. Of {cells} cells on several processes, {equal} are **equal**, {refused} are **refused** with an
error{wrong}. `make libraries` installs the libraries into environments of their own, trains the modules and writes this
page.

| library | module | equal on | shuffled | loaded | refused on |
|---|---|---|---|---|---|
"""


def page() -> str:
    """Return the page as text."""
    outcomes = recorded()
    numbers = count(beyond_single(outcomes))
    modules = sum(not name.endswith((SHUFFLED, LOADED)) for found in outcomes.values() for name in found)
    wrong = f", {numbers['wrong']} are still **wrong**" if numbers["wrong"] else ""
    cells = sum(numbers[kind] for kind in ("equal", "refused", "wrong"))
    fields = {**numbers, "modules": modules, "wrong": wrong, "cells": cells, "libraries": len(outcomes)}
    return HEAD.format(**fields) + "".join(
        line for library, found in outcomes.items() for line in _lines(library, found)
    )


def _lines(library: str, found: dict[str, dict[str, str]]) -> Iterator[str]:
    label = f"{LIBRARIES[library].name} {LIBRARIES[library].version()}"
    for name in found:
        if name.endswith((SHUFFLED, LOADED)):
            continue
        rows = {end: found.get(name + end, {}) for end in ("", SHUFFLED, LOADED)}
        equal = (", ".join(layout for layout, outcome in row.items() if outcome == "equal") for row in rows.values())
        others = {f"{layout}{end}": outcome for end, row in rows.items() for layout, outcome in row.items()}
        yield f"| {label} | {name} | {' | '.join(equal)} | {'<br>'.join(_refusals(others))} |\n"


def _refusals(row: dict[str, str]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for layout, outcome in row.items():
        kind, _, words = outcome.partition(": ")
        if kind == "refused":
            reasons.setdefault(f"“{_escaped(words)}…”", []).append(layout)
        elif kind == "wrong":
            reasons.setdefault("**wrong**", []).append(layout)
    for reason, layouts in reasons.items():
        yield f"{', '.join(layouts)}: {reason}"


def _escaped(words: str) -> str:
    return words.rstrip(".,:; ").replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(count(beyond_single(recorded())))
