"""The code blocks of README.md, CONTRIBUTING.md and docs/, and what a comment in front of one says about it.

A mark is an HTML comment on the line above a block:

    <!-- not run: why -->           this machine cannot run it, or it is no command; Python is parsed all the same
    <!-- in snippets: why -->       lines of Python that `make snippets` runs, as a script, and the tests do not
    <!-- exit code: 1 0 -->         what the commands of the block end with, one after the other, the last for the rest;
                                    2: it is refused. Without the mark: 0
    <!-- file: my_conf/recipe/a.yaml -->  the block is this file, which the rest of the page finds
    <!-- with: recipe=digits -->    what the lines of a yaml block are added to
    <!-- ranks: 2 -->               how many ranks run a Python block, where its own `devices=` does not say it

What is done with each language stands in test_blocks.py.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKS = ("not run", "in snippets", "exit code", "file", "with", "ranks")
SHELL = ("bash", "sh", "console")
PLAIN = ("", "text")
LANGUAGES = (*SHELL, *PLAIN, "python", "yaml", "toml", "json")

_FENCE = re.compile(r"(?P<indent>[ >]*)(?P<fence>```+|~~~+) *(?P<language>[\w+-]*)")
_MARK = re.compile(r"<!-- (?P<name>[a-z ]+?)(?:: (?P<value>.*?))? -->")
# What a command begins with: a block of output may hold such a line, but does not begin with it.
_COMMAND = re.compile(r"\s*(\$ |trainwright |torchrun |srun |make |pip install |python3? -m )")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: path from the root of the repository.
        line: of the fence, counted from 1.
        language: behind the fence; empty = none.
        text: between the fences, without common indentation.
        mark: name of the mark in front of it; empty = none.
        value: what the mark says.
    """

    page: str
    line: int
    language: str
    text: str
    mark: str = ""
    value: str = ""

    @property
    def place(self) -> str:
        """Where a person finds it."""
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Every page that has blocks to check."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    return [str(path.relative_to(ROOT)) for path in found]


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return list(parse(page, (ROOT / page).read_text(encoding="utf-8")))


def parse(page: str, text: str) -> Iterator[Block]:
    """The fenced blocks of a text.

    Raises:
        ValueError: if a fence has no end, or a mark is not understood.
    """
    lines = iter(enumerate(text.splitlines(), 1))
    before = ""
    for number, line in lines:
        opening = _FENCE.match(line)
        if opening is None:
            before = line if line.strip() else before
            continue
        inside: list[str] = []
        for _, each in lines:
            if each.strip().rstrip("`~") == "" and each.strip().startswith(opening["fence"]):
                break
            inside.append(each.removeprefix(opening["indent"]))
        else:
            raise ValueError(f"{page}:{number}: the block has no end")
        mark, value = _mark(f"{page}:{number}", before)
        yield Block(page, number, opening["language"], textwrap.dedent("\n".join(inside)) + "\n", mark, value)
        before = ""


def _mark(place: str, line: str) -> tuple[str, str]:
    found = _MARK.fullmatch(line.strip())
    if found is None or found["name"] in ("table of keys", "end of the table"):
        return "", ""
    if found["name"] not in MARKS or not found["value"]:
        raise ValueError(
            f"{place}: {line.strip()} is no mark; marks: " + ", ".join(f"<!-- {m}: ... -->" for m in MARKS)
        )
    return found["name"], found["value"]


def hidden_commands(page: str, text: str) -> list[str]:
    """Commands that no test would see: in a block without a language, or indented in place of a fence."""
    found = [
        f"{block.place}: begins with a command; write ```bash"
        for block in parse(page, text)
        if block.language in PLAIN and not block.mark and _COMMAND.match(block.text)
    ]
    outside = [(number, line) for number, line in _outside_of_fences(text) if re.match(r"(    |\t)", line)]
    return found + [f"{page}:{number}: a command without a fence" for number, line in outside if _COMMAND.match(line)]


def _outside_of_fences(text: str) -> Iterator[tuple[int, str]]:
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        opening = _FENCE.match(line)
        if opening is not None and not fence:
            fence = opening["fence"]
        elif fence:
            fence = "" if line.strip().startswith(fence) else fence
        else:
            yield number, line
