"""Cells of the fuzzer: runs them and their references, and judges what became of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

from tests.fuzz.compare import Cell, joined
from tests.fuzz.layouts import LAYOUTS
from tests.fuzz.program import Program
from tests.fuzz.run import Run, train
from tests.pool import RankError, RankTimeout

TIMEOUT = 40.0
# Errors of Python, which refuse nothing.
INTERNAL = re.compile(r"(Key|Index|Attribute)Error|AssertionError: $|ValueError: (zip\(\)|not enough|too many)")


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes:
        kind: ``equal``, ``refused``, ``wrong``, ``hung``, ``crashed``, or ``undefined``: not finite on one process.
        text: what differs or was said, in one line.
    """

    kind: str
    text: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether the product is at fault."""
        return self.kind in ("wrong", "hung", "crashed")

    @property
    def subject(self) -> tuple[str, ...]:
        """The kind, and the first words of the text without numbers."""
        return (self.kind, *re.findall(r"[A-Za-z]{3,}", self.text)[:3])

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


class References:
    """Runs on one process, each made once."""

    def __init__(self, ranks: Callable[..., list[Any]]) -> None:
        self._ranks = ranks
        self.of = cache(self._of)

    def _of(self, program: Program, layout: str | None, parts: int, waves: int) -> list[Run]:
        """Return the uninterrupted run of a program whose steps have so many micro-batches."""
        if program.precision == "16-mixed" and layout is None:
            program = replace(program, precision="32-true")
        alone = layout in (None, "single")
        ranks = 1 if layout is None else LAYOUTS[layout].ranks
        runs: list[Run] = self._ranks(train, ranks, program, layout, parts, waves, init_group=not alone)
        for run in runs:
            if run is None or run.error:
                raise AssertionError(f"uninterrupted: {run and run.trace}")
        return runs


def tried(ranks: Callable[..., list[Any]], references: References, program: Program, name: str) -> Outcome:
    """Run a cell and return its outcome.

    Args:
        ranks: runs a function on ranks; see :mod:`tests.pool`.
        references: runs on one process.
        program: what to run.
        name: the layout, or ``FIRST>SECOND``: the run is stopped under the first and resumed under the second.
    """
    cell = Cell(program, tuple(name.split(">")))
    expected = references.of(replace(program, stop=0), *cell.reference)
    if not all(math.isfinite(loss) for loss in expected[0].losses):
        return Outcome("undefined", "losses of one process are not finite")
    with TemporaryDirectory() as folder:
        return _run(ranks, cell, expected, f"{folder}/saved")


def _run(ranks: Callable[..., list[Any]], cell: Cell, expected: list[Run], path: str) -> Outcome:
    runs: list[Run] = []
    for place, name in enumerate(cell.names):
        saves, resumes = path if place < len(cell.names) - 1 else "", path if place else None
        options = (cell.program, name, cell.parts_under(name), 1, saves, resumes)
        try:
            answers = ranks(train, LAYOUTS[name].ranks, *options, timeout=TIMEOUT)
        except RankTimeout as error:
            return Outcome("hung", _line(str(error), 300))
        except RankError as error:
            return Outcome("crashed", _line(f"died: {error}", 300))
        latest = [run for run in answers if run is not None]
        runs = joined(runs, latest)
        failed = min((run for run in latest if run.error), key=lambda run: run.when, default=None)
        if failed is not None:
            return _failed(failed, next(cell.differences(runs, expected, ended=False), ""))
    found = list(cell.differences(runs, expected))
    return Outcome("wrong", f"{found[0]} (and {len(found) - 1} more)") if found else Outcome("equal")


def _failed(run: Run, differs: str) -> Outcome:
    """Return the outcome of a run with an error, before which something may differ."""
    said = _line(run.error, 400)
    if differs:
        return Outcome("wrong", f"{differs}, before {said}")
    if run.ours and not INTERNAL.match(said):
        return Outcome("refused", said)
    return Outcome("crashed", f"{said} [{_place(run.trace)}]")


def _line(text: str, size: int) -> str:
    return " ".join(text.split())[:size]


def _place(trace: str) -> str:
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    ours = [line for line in lines if "trainwright" in line or "/wt/" in line]
    return (ours or lines or [""])[-1].replace('File "', "").rpartition("/src/")[2]


def run_cell(ranks: Callable[..., list[Any]], program: Program, name: str) -> Outcome:
    """Return the outcome of a cell; that of a program that one process cannot run is ``undefined``."""
    try:
        return tried(ranks, References(ranks), program, name)
    except AssertionError as error:
        return Outcome("undefined", _line(str(error)[-300:], 300))
