"""Measurements as table rows, and the goals."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.peers.field import BY_HAND, OURS
from benchmarks.peers.measure import Measured
from benchmarks.peers.task import Task
from benchmarks.report import Goal, table_of

MOST_TO_HAND = 1.01
"""How much longer than by hand a step of ours may take."""
MOST_SECONDS_FOR_TWO = 6.0
"""Command to first step on two processes."""
MOST_LOSS_DIFFERENCE = 1e-5
# What fits side by side; the line of JSON has all.
_COLUMNS = ("layout", "side", "step_ms", "ratio", "cpu_ratio", "peak_mib", "sent_kib", "start_s", "lines", "loss_diff")


def rows_of(results: Mapping[str, Mapping[str, Measured]]) -> list[dict[str, Any]]:
    """One row per layout and side.

    Args:
        results: layout -> side -> what was measured. Losses are compared with one process by hand where that took part,
            else with the first side of the layout that trained.
    """
    one = results.get("single", {}).get(BY_HAND)
    return [
        _row(layout, name, measured, sides[BY_HAND], one if one is not None and one.losses else _trained(sides))
        for layout, sides in results.items()
        for name, measured in sides.items()
    ]


def _trained(sides: Mapping[str, Measured]) -> Measured | None:
    return next((measured for measured in sides.values() if measured.losses), None)


def _row(layout: str, name: str, measured: Measured, hand: Measured, one: Measured | None) -> dict[str, Any]:
    row: dict[str, Any] = {"layout": layout, "side": name}
    wall, cpu = (_medians(measured, what) for what in ("wall", "cpu"))
    walls, cpus = (_medians(hand, what) for what in ("wall", "cpu"))
    row |= {
        "step_ms": _rounded(wall, 1e3 / measured.steps, 1),
        "ratio": _rounded(wall, 1 / walls, 3) if walls else None,
        "paired": _paired(measured, hand),
        "cpu_ms": _rounded(cpu, 1e3 / measured.steps, 1),
        "cpu_ratio": _rounded(cpu, 1 / cpus, 3) if cpus else None,
        "peak_mib": max((round(piece.peak / 2**20) for piece in measured.pieces), default=None),
        "sent_kib": _rounded(_medians(measured, "written"), 1 / 1024 / measured.steps, 0),
        "start_s": round(median(measured.starts), 2) if measured.starts else None,
        "lines": measured.lines,
        "loss_diff": None if one is None or not measured.losses else _difference(measured.losses, one.losses),
        "version": measured.version,
        "error": measured.error,
    }
    return row


def _medians(measured: Measured, what: str) -> float | None:
    return median(getattr(piece, what) for piece in measured.pieces) if measured.pieces else None


def _rounded(value: float | None, factor: float, digits: int) -> float | int | None:
    if value is None:
        return None
    return round(value * factor, digits) if digits else round(value * factor)


def _paired(measured: Measured, hand: Measured) -> float | None:
    """Median of the ratios within each round; what drifts slowly cancels."""
    pairs = list(zip(measured.pieces, hand.pieces, strict=False))
    return round(median(own.wall / other.wall for own, other in pairs), 3) if pairs else None


def _difference(losses: list[float], other: list[float]) -> float:
    """Largest relative difference of a step's loss."""
    largest = max(abs(a - b) / abs(b) for a, b in zip(losses, other, strict=False))
    return float(f"{largest:.1e}")


def tables_of(rows: list[dict[str, Any]], task: Task, ranks: int) -> list[Table]:
    """A table of what ran, and one of what did not."""
    ran = [_shown(row, *_COLUMNS) for row in rows if row["step_ms"] is not None]
    config = task.config
    size = f"{config.layers} x {config.dim}, {task.batch} windows of {config.seq_len} a step, {task.device}"
    precision = "bf16" if task.bf16 else "fp32"
    title = f"GPT {size}, {precision}; {ranks} processes, medians of {task.pieces} x {task.steps} steps"
    tables = [table_of(title, ran)] if ran else []
    return [*tables, *table_of_errors(rows, "layout")]


def table_of_errors(rows: list[dict[str, Any]], *keys: str) -> list[Table]:
    """A table of what did not run, each in its own words; none if all did."""
    errors = [_shown(row, *keys, "side", "version", "error") for row in rows if row["error"]]
    return [table_of("What did not run", errors)] if errors else []


def _shown(row: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """These fields, with the version behind the name of the side."""
    side = row["side"] if row["version"] is None else f"{row['side']} {row['version']}"
    return {key: side if key == "side" else row[key] for key in keys if key != "version"}


def goals_of(rows: list[dict[str, Any]]) -> list[Goal]:
    """Of ours: against by hand, against the best other peer, the start, and the losses."""
    goals: list[Goal] = []
    for row in rows:
        if row["side"] != OURS or row["step_ms"] is None:
            continue
        layout = row["layout"]
        others = [
            other["step_ms"]
            for other in rows
            if other["layout"] == layout and other["side"] not in (OURS, BY_HAND) and other["step_ms"] is not None
        ]
        if row["ratio"] is not None:
            goals.append(Goal(f"step to that by hand, {layout}", row["ratio"], MOST_TO_HAND))
        if others:
            goals.append(Goal(f"step to that of the fastest peer, {layout}", row["step_ms"] / min(others), 1.0))
        if layout == "ddp":
            goals.append(Goal("seconds to the first step, ddp", row["start_s"], MOST_SECONDS_FOR_TWO))
        if row["loss_diff"] is not None:
            goals.append(Goal(f"difference of losses, {layout}", row["loss_diff"], MOST_LOSS_DIFFERENCE))
    return goals
