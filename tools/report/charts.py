"""Charts of memory by rank, time by step and rank, and norms by block, beside predicted values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainwright.core.charts.drawing import COLOURS, BarTable, CurveChart, amount, curve_chart, exact, stacked, thinned
from trainwright.tools.report.plain import number_of, steps_of, whole_of
from trainwright.tools.report.records import RunRecord

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
_OF_PROCESS = ("peak", "allocated", "reserved", "host", "host_peak")
_REST = "other allocated"
_MOST_RANKS = 64


def memory_by_rank(run: RunRecord) -> BarTable | None:
    """Return the peak bytes of each kind by rank, preceded by the predicted peak of the largest rank."""
    measured = {rank: held for rank in sorted(run.monitor) if (held := _peaks(run.monitor[rank]))}
    if not measured:
        return None
    ranks = [list(measured)[i] for i in thinned(list(measured), _MOST_RANKS)]
    predicted = predicted_memory(run.plan)
    rows = [(f"rank {rank}", measured[rank]) for rank in ranks]
    rows = [*([("predicted", predicted)] if predicted else []), *rows]
    kinds = [kind for kind in (*KINDS, _REST) if any(kind in row for _, row in rows)]
    beside = [name for name in _OF_PROCESS if any(name in row for _, row in rows)]
    shown = kinds or ["peak" if "peak" in beside else "host"]
    drawn = []
    for label, row in rows:
        cells = [sum(row.get(kind, 0.0) for kind in shown), *(row.get(name) for name in (*kinds, *beside))]
        drawn.append((label, row, ["" if cell is None else amount(cell, "bytes") for cell in cells]))
    head = ("rank", "memory", "total", *kinds, *(name.replace("_", " ") for name in beside))
    colours = {kind: number for number, kind in enumerate(shown)}
    mark = sum(predicted.values()) if predicted else None
    return stacked("Peak bytes of each kind by rank", head, colours, drawn, "bytes", mark)


def predicted_memory(plan: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the bytes by kind that plan.json predicts for the largest rank; {} if it does not."""
    found = _chosen(plan, "bytes")
    return {kind: value for kind in KINDS if (value := number_of(found.get(kind))) is not None}


def _chosen(plan: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    """Return a mapping within the layout that plan.json chose; {} if there is none."""
    chosen = (plan or {}).get("chosen")
    found = chosen.get(name) if isinstance(chosen, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _peaks(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    held: dict[str, float] = {}
    for record in records:
        if record["kind"] != "memory":
            continue
        for name in (*KINDS, *_OF_PROCESS):
            value = number_of(record.get(name))
            if value is not None:
                held[name] = max(held.get(name, 0.0), value)
    known = sum(held.get(kind, 0.0) for kind in KINDS)
    if "peak" in held and any(kind in held for kind in KINDS) and held["peak"] > known:
        held[_REST] = held["peak"] - known
    return held


_NORMS = {"grad": "L2 norm of gradients", "param": "L2 norm of parameters"}
_ALL = "all"


@dataclass(frozen=True)
class NormCharts:
    """Norms by block.

    Args:
        charts: of gradients and of parameters, one curve per drawn block and one for all blocks.
        rows: block, newest norms of gradient and parameters, and their ratio.
        left_out: number of blocks without a curve.
    """

    charts: tuple[CurveChart, ...]
    rows: tuple[tuple[str, ...], ...]
    left_out: int


def norms(run: RunRecord) -> NormCharts | None:
    """Return the norms of gradients and parameters by block; None if none were logged."""
    by_block = {what: _of_blocks(run.metrics, f"norm/{what}/") for what in _NORMS}
    blocks = list(dict.fromkeys(block for each in by_block.values() for block in each))
    if not blocks:
        return None
    single = [block for block in blocks if block != _ALL]
    shown = [*(block for block in (_ALL,) if block in blocks), *(single[i] for i in thinned(single, COLOURS - 1))]
    charts = [
        chart
        for what, title in _NORMS.items()
        if (chart := curve_chart(title, {b: (n, by_block[what].get(b, [])) for n, b in enumerate(shown)}))
    ]
    rows = []
    for block in blocks:
        grad, param = (_last(by_block[what].get(block)) for what in ("grad", "param"))
        share = None if grad is None or not param else grad / param
        rows.append((block, *("" if each is None else exact(each) for each in (grad, param, share))))
    return NormCharts(tuple(charts), tuple(rows), len(blocks) - len(shown))


def is_norm(name: str) -> bool:
    """Return whether :func:`norms` shows this metric."""
    return name.startswith(tuple(f"norm/{what}/" for what in _NORMS))


def _of_blocks(metrics: Mapping[str, list[tuple[int, float]]], before: str) -> dict[str, list[tuple[int, float]]]:
    return {name.removeprefix(before): values for name, values in metrics.items() if name.startswith(before) and values}


def _last(values: Sequence[tuple[int, float]] | None) -> float | None:
    return values[-1][1] if values else None


PARTS = ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "other")
_MOST_BARS = 24


def time_by_step(run: RunRecord) -> BarTable | None:
    """Return the seconds of a step by part for each window, averaged over ranks."""
    windows: dict[int, list[dict[str, float]]] = {}
    for _, record in run.records("step"):
        spent, step = per_step(record), whole_of(record.get("step"))
        if spent and step is not None:
            windows.setdefault(step, []).append(spent)
    if not windows:
        return None
    steps = sorted(windows)
    rows = [(f"step {steps[i]}", _mean(windows[steps[i]])) for i in thinned(steps, _MOST_BARS)]
    return _time_table("Seconds of an optimizer step by window, mean over ranks", "window until", rows)


def time_by_rank(run: RunRecord) -> BarTable | None:
    """Return the seconds of a step by part for each rank, averaged over all steps but the first window (warm-up)."""
    rows = []
    for rank in sorted(run.monitor):
        noted = [record for record in run.monitor[rank] if record["kind"] == "step"]
        spent, steps = dict.fromkeys(PARTS, 0.0), 0.0
        for record in noted[1:] or noted:
            seconds, count = _seconds(record), steps_of(record)
            for part, value in seconds.items():
                spent[part] += value
            steps += count if seconds else 0.0
        if steps:
            rows.append((f"rank {rank}", {part: value / steps for part, value in spent.items()}))
    if not rows:
        return None
    shown = [rows[i] for i in thinned(rows, _MOST_RANKS)]
    return _time_table("Seconds of an optimizer step by rank, mean over steps", "rank", shown)


def predicted_seconds(run: RunRecord) -> tuple[float, float | None] | None:
    """Return the predicted seconds of a step and the measured median; None without a prediction."""
    predicted = number_of(_chosen(run.plan, "seconds").get("step"))
    measured = [value for _, value in run.metrics.get("step_seconds", [])]
    return None if predicted is None else (predicted, median(measured) if measured else None)


def _time_table(caption: str, first: str, rows: Sequence[tuple[str, Mapping[str, float]]]) -> BarTable:
    colours = {part: number for number, part in enumerate(PARTS) if any(row.get(part) for _, row in rows)}
    drawn = []
    for label, row in rows:
        cells = [sum(row.values()), *(row.get(part, 0.0) for part in colours)]
        drawn.append((label, row, [amount(cell, "seconds") for cell in cells]))
    return stacked(caption, (first, "time", "whole step", *colours), colours, drawn, "seconds")


def _seconds(record: Mapping[str, Any]) -> dict[str, float]:
    seconds = record.get("seconds")
    if not isinstance(seconds, Mapping):
        return {}
    known = {part: number_of(seconds.get(part)) for part in PARTS}
    return {part: max(value, 0.0) for part, value in known.items() if value is not None}


def per_step(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of an optimizer step by part from a `step` record; {} if it has none."""
    steps = steps_of(record)
    return {part: value / steps for part, value in _seconds(record).items()}


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: sum(row.get(part, 0.0) for row in rows) / len(rows) for part in PARTS}
