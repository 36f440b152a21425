"""Write docs/what_runs.md from the recorded outcomes: ``python -m tests.zoo``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import shorten

from tests.zoo.table import THEMES, count, recorded

PAGE = Path(__file__).parents[2] / "docs" / "what_runs.md"
HEAD = """# What runs where

{modules} modules on layouts of two and four ranks ({cells} cells), each compared with `lightning.Trainer` on one
process: losses, logged values, parameters and buffers. {equal} cells train **equally**, {refused} are **refused** with
an error{wrong}. `make zoo` runs this table, `python -m tests.zoo` writes it.
"""


def page() -> str:
    """Return the page as text."""
    outcomes = recorded()
    numbers = count(outcomes)
    wrong = f", {numbers['wrong']} are still **wrong**" if numbers["wrong"] else ""
    cells = sum(numbers[kind] for kind in ("equal", "refused", "wrong"))
    parts = [HEAD.format(**{**numbers, "wrong": wrong}, cells=cells)]
    for theme, heading in THEMES.items():
        parts += [f"\n## {heading}\n\n", *_equal(outcomes.get(theme, {})), *_others(outcomes.get(theme, {}))]
    return "".join(parts)


def _joined(layouts: Iterable[str]) -> str:
    text = ", ".join(layouts)
    for numbers, short in (("1, zero2, zero3", "1-3"), ("2, zero3", "2-3"), ("1, zero2", "1-2")):
        text = text.replace(numbers, short)
    return text


def _grouped(modules: dict[str, list[str]]) -> Iterable[tuple[str, list[str]]]:
    """Return layouts, and the modules that have the same ones."""
    found: dict[str, list[str]] = {}
    for name, layouts in modules.items():
        found.setdefault(_joined(layouts), []).append(name)
    return found.items()


def _equal(rows: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield a table of the modules that train equally on the same layouts."""
    equal = {name: [layout for layout, outcome in row.items() if outcome == "equal"] for name, row in rows.items()}
    yield "| trains equally on | modules |\n|---|---|\n"
    for layouts, names in _grouped(equal):
        if layouts:
            yield f"| {layouts} | {'; '.join(names)} |\n"


def _others(rows: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield a table of refusals, grouped by reason."""
    cells: dict[str, dict[str, list[str]]] = {}
    for name, row in rows.items():
        for layout, outcome in row.items():
            if outcome != "equal":
                kind, _, words = outcome.partition(": ")
                first = shorten(words, 26, placeholder="").rstrip(".,:;")
                escaped = first.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
                reason = f"“{escaped}…”" if kind == "refused" else "**wrong**"
                cells.setdefault(reason, {}).setdefault(name, []).append(layout)
    if cells:
        yield "\n| refused with | modules |\n|---|---|\n"
    for reason, modules in cells.items():
        named = "<br>".join(f"{layouts}: {'; '.join(names)}" for layouts, names in _grouped(modules))
        yield f"| {reason} | {named} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(count(recorded()))
