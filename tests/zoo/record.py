"""Try cells of the zoo and record their outcomes: ``python -m tests.zoo.record [--new] [--wrong] [THEME[:ROW] ...]``.

Without names, all cells; with ``--new`` those that are not recorded, with ``--wrong`` also those recorded as wrong.
Prints each cell whose outcome differs from the record. Afterwards write the page again: ``python -m tests.zoo``.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from contextlib import chdir
from tempfile import TemporaryDirectory
from typing import Any

from tests.pool import RankPool
from tests.zoo.cells import Row, rows, tried
from tests.zoo.table import RECORD, THEMES, count, recorded

TIMEOUT = 60.0
# Of a refusal, words up to the first number or bracket are recorded: sizes, rounding, names and examples follow.
WORDS = re.compile(r"^[^\d(]{12,100}(?=\d|\(|\b)")


def shortened(outcome: str) -> str:
    """Return the recorded form of an outcome: its kind and the first words of a message."""
    kind, _, text = outcome.partition(": ")
    if kind == "refused":
        words = WORDS.match(text)
        text = words.group().strip() if words else text[:60]
    return f"{kind}: {text[:160]}" if text else kind


def main() -> None:
    """Try the chosen cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--new", action="store_true")
    parser.add_argument("--wrong", action="store_true")
    arguments = parser.parse_args()
    old: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    pool, started = RankPool(), time.monotonic()
    with TemporaryDirectory() as folder, chdir(folder):
        for theme in THEMES:
            for row in rows(theme):
                chosen = [layout for layout in row.layouts if _is_chosen(arguments, theme, row, layout, old)]
                if chosen:
                    _record(pool, theme, row, chosen, old)
                    _write(old)
    _write(old)
    pool.close()
    print(f"{time.monotonic() - started:.0f} s:", count(recorded()))


def _is_chosen(arguments: argparse.Namespace, theme: str, row: Row, layout: str, old: dict[str, Any]) -> bool:
    known = old.get(theme, {}).get(row.name, {}).get(layout)
    names = arguments.names
    if names and not any(name in (theme, f"{theme}:{row.name}") for name in names):
        return False
    if arguments.new or arguments.wrong:
        return known is None or (arguments.wrong and known.startswith("wrong"))
    return True


def _record(pool: RankPool, theme: str, row: Row, layouts: list[str], old: dict[str, Any]) -> None:
    try:
        outcomes = tried(pool.run, theme, row, dict.fromkeys(layouts, True), TIMEOUT)
    except AssertionError as error:
        print(f"{theme}:{row.name}: {error}", flush=True)
        return
    known = old.setdefault(theme, {}).setdefault(row.name, {})
    for layout, outcome in outcomes.items():
        if known.get(layout) != shortened(outcome):
            print(f"{theme}:{row.name} | {layout}: {known.get(layout)} -> {outcome[:300]}", flush=True)
        known[layout] = shortened(outcome)


def _write(outcomes: dict[str, Any]) -> None:
    """Write what the table still holds, in its order."""
    kept = {
        theme: {
            row.name: {layout: found[layout] for layout in row.layouts if layout in found}
            for row in rows(theme)
            if (found := outcomes.get(theme, {}).get(row.name))
        }
        for theme in THEMES
    }
    RECORD.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
