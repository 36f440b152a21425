"""Shrinks a failing program: removes one feature at a time while it still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.fuzz.cells import Outcome
from tests.fuzz.compare import comparable
from tests.fuzz.layouts import LAYOUTS
from tests.fuzz.program import Program

# Cells that a failure may cost.
MOST_TRIES = 60


def shrunk(
    run: Callable[[Program, str], Outcome], program: Program, cell: str, outcome: Outcome
) -> tuple[Program, str, Outcome]:
    """Return the simplest program and cell found that fail in the same way, and their outcome.

    Args:
        run: runs a cell; called at most :data:`MOST_TRIES` times.
        program, cell, outcome: the failure.
    """
    known = {(program, cell)}
    changed = True
    while changed:
        changed = False
        for simplify in _simplifications(program, cell):
            simpler = simplify(program, cell)
            if simpler in known or len(known) > MOST_TRIES or not _is_cell(*simpler):
                continue
            known.add(simpler)
            got = run(*simpler)
            if got.subject == outcome.subject:
                (program, cell), outcome, changed = simpler, got, True
    return program, cell, outcome


def _is_cell(program: Program, cell: str) -> bool:
    names = cell.split(">")
    if bool(program.stop) != (len(names) > 1) or program.stop >= program.epochs * program.per_epoch:
        return False
    return all(comparable(program, LAYOUTS[name]) for name in names)


def _simplifications(program: Program, cell: str) -> list[Callable[[Program, str], tuple[Program, str]]]:
    """Return functions that each remove a feature of a program or of its cell."""
    found: list[Callable[[Program, str], tuple[Program, str]]] = []
    first, resumes, second = cell.partition(">")
    if resumes:
        found += [
            lambda program, cell, name=name: (replace(program, stop=0), name)  # type: ignore[misc]
            for name in (second, first)
        ]
        found += [
            lambda program, cell: (program, f"single>{second}"),
            lambda program, cell: (program, f"{first}>single"),
        ]
    for changes in program.simplifications():
        found.append(lambda program, cell, changes=changes: (replace(program, **changes), cell))  # type: ignore[misc]
    return found
