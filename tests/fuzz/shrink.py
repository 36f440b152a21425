"""Shrinks a failing program: removes one feature at a time while it still fails in the same way."""

from __future__ import annotations

from dataclasses import replace

from tests.fuzz.cells import Outcome, run_cell
from tests.fuzz.compare import comparable
from tests.fuzz.layouts import LAYOUTS
from tests.fuzz.program import Program
from tests.pool import RankPool

# Cells that a failure may cost.
MOST_TRIES = 60


def shrunk(pool: RankPool, program: Program, cell: str, outcome: Outcome) -> tuple[Program, str, Outcome]:
    """Return the simplest program and cell found that fail in the same way, and their outcome."""
    tries, found = 0, True
    while found:
        found = False
        for simpler, other in _simpler(program, cell):
            if tries == MOST_TRIES or not all(comparable(simpler, LAYOUTS[name]) for name in other.split(">")):
                continue
            tries += 1
            got = run_cell(pool, simpler, other)
            if got.kind == outcome.kind:
                program, cell, outcome, found = simpler, other, got, True
                break
    return program, cell, outcome


def _simpler(program: Program, cell: str) -> list[tuple[Program, str]]:
    first, resumes, second = cell.partition(">")
    found = []
    if resumes:
        found += [(replace(program, stop=0), second), (replace(program, stop=0), first)]
        if first != "single":
            found.append((program, f"single>{second}"))
    found += [(each, cell) for each in program.simpler() if each.stop or not resumes]
    return found
