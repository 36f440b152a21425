"""Where the time of steps went, and how long one was predicted to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from trainwright.core.charts.drawing import BarTable, amount, stacked, thinned
from trainwright.tools.report.plain import number_of, steps_of
from trainwright.tools.report.records import RunRecord

PARTS = ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "other")
_MOST_BARS = 24
_MOST_RANKS = 64


def time_by_step(run: RunRecord) -> BarTable | None:
    """Where the time of steps went, window by window: seconds of a step, averaged over ranks."""
    windows: dict[int, list[dict[str, float]]] = {}
    for _, record in run.records("step"):
        spent = per_step(record)
        step = number_of(record.get("step"))
        if spent and step is not None:
            windows.setdefault(int(step), []).append(spent)
    if not windows:
        return None
    steps = sorted(windows)
    rows = [(f"step {steps[i]}", _mean(windows[steps[i]])) for i in thinned(steps, _MOST_BARS)]
    return _time_table("Seconds of an optimizer step by window, mean over ranks", "window until", rows)


def time_by_rank(run: RunRecord) -> BarTable | None:
    """The same rank by rank, averaged over all steps but the first one (which warms caches) if there are others."""
    rows = []
    for rank in sorted(run.monitor):
        noted = [record for record in run.monitor[rank] if record["kind"] == "step"]
        spent, steps = dict.fromkeys(PARTS, 0.0), 0.0
        for record in noted[1:] or noted:
            seconds, count = _seconds(record), steps_of(record)
            for part, value in seconds.items():
                spent[part] = spent.get(part, 0.0) + value
            steps += count if seconds else 0.0
        if steps:
            rows.append((f"rank {rank}", {part: value / steps for part, value in spent.items()}))
    if not rows:
        return None
    shown = [rows[i] for i in thinned(rows, _MOST_RANKS)]
    return _time_table("Seconds of an optimizer step by rank, mean over steps", "rank", shown)


def predicted_seconds(run: RunRecord) -> tuple[float, float | None] | None:
    """Seconds of a step that plan.json predicts, and the middle of those that were measured; None without the first."""
    chosen = (run.plan or {}).get("chosen")
    seconds = chosen.get("seconds") if isinstance(chosen, Mapping) else None
    predicted = number_of(seconds.get("step")) if isinstance(seconds, Mapping) else None
    measured = [value for _, value in run.metrics.get("step_seconds", [])]
    return None if predicted is None else (predicted, median(measured) if measured else None)


def _time_table(caption: str, first: str, rows: Sequence[tuple[str, Mapping[str, float]]]) -> BarTable:
    parts = [part for part in PARTS if any(row.get(part) for _, row in rows)]
    scale = max(sum(row.values()) for _, row in rows)
    bars = [
        stacked(
            label,
            [(part, PARTS.index(part), row.get(part, 0.0)) for part in parts],
            scale,
            "seconds",
            [amount(sum(row.values()), "seconds"), *(amount(row.get(part, 0.0), "seconds") for part in parts)],
        )
        for label, row in rows
    ]
    legend = tuple((part, PARTS.index(part)) for part in parts)
    return BarTable(caption, (first, "time", "whole step", *parts), legend, tuple(bars))


def _seconds(record: Mapping[str, Any]) -> dict[str, float]:
    seconds = record.get("seconds")
    if not isinstance(seconds, Mapping):
        return {}
    known = {part: number_of(seconds.get(part)) for part in PARTS}
    return {part: max(value, 0.0) for part, value in known.items() if value is not None}


def per_step(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of an optimizer step by part, as one record of `kind` step has them; empty if it has none."""
    steps = steps_of(record)
    return {part: value / steps for part, value in _seconds(record).items()}


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: sum(row.get(part, 0.0) for row in rows) / len(rows) for part in PARTS}
