"""Write docs/libraries.md from the recorded outcomes: ``python -m tests.libraries``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.libraries.base import SHUFFLED
from tests.libraries.environments import LIBRARIES
from tests.libraries.table import beyond_single, recorded
from tests.zoo.table import count

PAGE = Path(__file__).parents[2] / "docs" / "libraries.md"
HEAD = """# Libraries

{modules} modules of {libraries} libraries, unmodified, on small generated data: losses, logged values, parameters,
predictions and the loaded checkpoint are compared with Lightning's Trainer on one process. Of {cells} cells on two and
four processes, {equal} are **equal** (in italics: shuffled, too), {refused} are **refused** with an error{wrong}. `make libraries` installs the
libraries into environments of their own, trains the modules and writes this page.

| library | module | equal on | refused on |
|---|---|---|---|
"""


def page() -> str:
    """Return the page as text."""
    outcomes = recorded()
    numbers = count(beyond_single(outcomes))
    modules = sum(SHUFFLED not in name for found in outcomes.values() for name in found)
    wrong = f", {numbers['wrong']} are still **wrong**" if numbers["wrong"] else ""
    cells = sum(numbers[kind] for kind in ("equal", "refused", "wrong"))
    head = HEAD.format(
        **{**numbers, "modules": modules, "wrong": wrong}, libraries=sum(map(bool, outcomes.values())), cells=cells
    )
    return head + "".join(line for library, found in outcomes.items() for line in _lines(library, found))


def _lines(library: str, found: dict[str, dict[str, str]]) -> Iterator[str]:
    label = f"{LIBRARIES[library].name} {LIBRARIES[library].version()}"
    for name, row in found.items():
        if SHUFFLED in name:
            continue
        row = row | {f"{layout}{SHUFFLED}": outcome for layout, outcome in found.get(name + SHUFFLED, {}).items()}
        equal = [layout for layout, outcome in row.items() if outcome == "equal"]
        yield f"| {label} | {name} | {_joined(equal)} | {'<br>'.join(_refusals(row))} |\n"


def _joined(layouts: list[str]) -> str:
    """Return layouts separated by commas; those that are equal shuffled, too, in italics."""
    shuffled = {layout.removesuffix(SHUFFLED) for layout in layouts if layout.endswith(SHUFFLED)}
    plain = [layout for layout in layouts if not layout.endswith(SHUFFLED)]
    return ", ".join(f"*{layout}*" if layout in shuffled else layout for layout in plain)


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
