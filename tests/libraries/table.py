"""The recorded outcomes of the libraries' cells."""

from __future__ import annotations

import json
from pathlib import Path

from tests.libraries.environments import LIBRARIES
from tests.zoo.cells import SINGLE

RECORD = Path(__file__).with_name("outcomes.json")

# Library -> row -> layout -> outcome: ``equal``, ``refused: WORDS`` or ``wrong: WHAT``.
Outcomes = dict[str, dict[str, dict[str, str]]]


def theme_of(library: str) -> str:
    """Return the full name of the file of rows."""
    return f"tests.libraries.{library}"


def recorded() -> Outcomes:
    """Return the recorded outcomes."""
    found: Outcomes = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def write(outcomes: Outcomes) -> None:
    """Write them, in the order of the libraries."""
    kept = {library: outcomes[library] for library in LIBRARIES if library in outcomes}
    RECORD.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def beyond_single(outcomes: Outcomes) -> Outcomes:
    """Return the cells of layouts with several processes."""
    return {
        library: {
            name: {layout: outcome for layout, outcome in row.items() if layout != SINGLE}
            for name, row in found.items()
        }
        for library, found in outcomes.items()
    }
