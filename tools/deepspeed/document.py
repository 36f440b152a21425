"""The table of docs/deepspeed.md: all keys, and what becomes of them.

`python -m trainwright.tools.deepspeed.document docs/deepspeed.md` writes it anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from trainwright.tools.deepspeed.key import Key
from trainwright.tools.deepspeed.table import TABLE

BEGIN, END = "<!-- table of keys -->", "<!-- end of the table -->"


def markdown_table() -> str:
    """The table; keys of a section of which the same is said share a row."""
    rows = ["| key | here | native configuration | how, or why not and what instead |", "|---|---|---|---|"]
    rows += [_row(list(keys)) for keys in _together()]
    return "\n".join(rows)


def with_table(text: str) -> str:
    """A document with its table written anew."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{markdown_table()}\n\n{END}{rest.split(END)[1]}"


def _together() -> Iterator[list[Key]]:
    def what(key: Key) -> tuple[str, str, str, str]:
        return ".".join(key.parts[:-1]), key.status, key.becomes, key.note

    for _, keys in groupby(sorted(TABLE, key=lambda key: _order(key)), key=what):
        yield list(keys)


def _order(key: Key) -> tuple[int, str]:
    """Sections as the tables have them, a key of its own before those that share a row."""
    sections = list(dict.fromkeys(".".join(other.parts[:-1]) for other in TABLE))
    section = ".".join(key.parts[:-1])
    return sections.index(section), f"{key.status}{key.becomes}{key.note}" if section else ""


def _row(keys: list[Key]) -> str:
    names = ", ".join(f"`{key.path}`" if index == 0 else f"`.{key.parts[-1]}`" for index, key in enumerate(keys))
    if len(keys) > 1 and len(keys[0].parts) == 1:
        names = ", ".join(f"`{key.path}`" for key in keys)
    first = keys[0]
    native = f"`{_cell(first.becomes)}`" if first.becomes else ""
    return f"| {names} | {first.status} | {native} | {_cell(first.note).replace('<', '&lt;')} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
