"""Write docs/what_runs.md from the recorded outcomes: ``python -m tests.zoo``."""

from __future__ import annotations

from pathlib import Path

from tests.zoo.table import THEMES, count, recorded

PAGE = Path(__file__).parents[2] / "docs" / "what_runs.md"
HEAD = """# What runs where

Modules of the kind that people write, on layouts of two and four ranks, each against `lightning.Trainer` on one process
with the same global batches: the losses of the first steps, the logged values, all parameters and buffers. `make zoo`
runs this table (`tests/zoo/`), `make test` a sample of it with every layout and model family, and `python -m tests.zoo`
writes this page from it.

{modules} modules in {cells} cells: {equal} train **equally**, {refused} are **refused** by an error before any weight
changes (or, where validation or code after `fit` asks for what a rank does not have, there){wrong}.
"""


def page() -> str:
    """Return the page as text."""
    outcomes = recorded()
    numbers = count(outcomes)
    wrong = f", {numbers['wrong']} are still **wrong**" if numbers["wrong"] else ""
    cells = sum(numbers[kind] for kind in ("equal", "refused", "wrong"))
    parts = [HEAD.format(**{**numbers, "wrong": wrong}, cells=cells)]
    for theme, heading in THEMES.items():
        lines = [f"\n## {heading}\n", "| module | trains equally | refused |", "|---|---|---|"]
        for name, row in outcomes.get(theme, {}).items():
            equal = ", ".join(layout for layout, outcome in row.items() if outcome == "equal")
            lines.append(f"| {name} | {equal} | {_others(row)} |")
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


def _others(row: dict[str, str]) -> str:
    """Return the layouts that refuse a module, grouped by message."""
    by_words: dict[str, list[str]] = {}
    for layout, outcome in row.items():
        if outcome != "equal":
            kind, _, words = outcome.partition(": ")
            escaped = words.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
            by_words.setdefault(f"“{escaped}…”" if kind == "refused" else "**wrong**", []).append(layout)
    return "; ".join(f"{', '.join(layouts)}: {words}" for words, layouts in by_words.items())


if __name__ == "__main__":
    PAGE.write_text(page())
    print(count(recorded()))
