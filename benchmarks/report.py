"""Output common to all benchmarks: progress on stderr, tables, and one line of JSON at the end."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

# A terminal that is narrower, or no terminal at all, still gets whole columns.
_WIDTH = 120


@dataclass(frozen=True)
class Goal:
    """A bound on one measured number.

    Args:
        name: what is bounded.
        value: what was measured.
        limit: the bound.
        at_least: whether ``limit`` is the least, not the most.
    """

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Return whether the measured value is within the limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def sentence(self) -> str:
        """One line for people."""
        return (
            f"{'holds ' if self.holds else 'FAILS '} {self.name}: {self.value:.4g} "
            f"(goal: at {'least' if self.at_least else 'most'} {self.limit:.4g})"
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields and ``holds``."""
        return {**asdict(self), "holds": self.holds}


def say(text: str) -> None:
    """Tell progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Where the numbers come from: usable CPU cores, versions, and the load of the machine now (1 minute)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": cores,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": version("torch"),
        "lightning": version("lightning"),
    }


def table_of(title: str, rows: list[dict[str, Any]]) -> Table:
    """A table with one column per key of the rows; numbers stand right."""
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        is_number = any(isinstance(row[name], int | float) for row in rows)
        table.add_column(name, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*("-" if value is None else str(value) for value in row.values()))
    return table


def seconds_rows(taken: Mapping[str, Sequence[float]], **first: Any) -> list[dict[str, Any]]:
    """One row per side: ``first``, the side, and median, least and most of its seconds."""
    return [
        {
            **first,
            "side": side,
            "seconds": round(median(seconds), 2),
            "least": round(min(seconds), 2),
            "most": round(max(seconds), 2),
        }
        for side, seconds in taken.items()
    ]


def finish(name: str, tables: list[Table], goals: list[Goal], result: dict[str, Any]) -> None:
    """Print the tables, the goals and the line of JSON.

    Args:
        name: the benchmark.
        tables: for people.
        goals: bounds; whether they hold is said, not enforced, since the machine may be busy.
        result: what was measured, made of plain values.
    """
    console = Console(width=max(_WIDTH, Console().width))
    for table in tables:
        console.print(table)
    for goal in goals:
        console.print(goal.sentence(), markup=False, highlight=False)
    line = {"benchmark": name, "machine": machine(), "goals": [goal.as_dict() for goal in goals], **result}
    print(json.dumps(line), flush=True)
