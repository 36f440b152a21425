"""What each rank held, beside what was predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainwright.core.charts.drawing import BarTable, amount, stacked, thinned
from trainwright.tools.report.plain import number_of
from trainwright.tools.report.records import RunRecord

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
_OF_PROCESS = ("peak", "allocated", "reserved", "host", "host_peak")
_REST = "other allocated"
_MOST_RANKS = 64


def memory_by_rank(run: RunRecord) -> BarTable | None:
    """What each rank held at most of each kind, in bytes, and first what was predicted of the rank that needs most."""
    measured = {rank: held for rank in sorted(run.monitor) if (held := _most_held(run.monitor[rank]))}
    if not measured:
        return None
    ranks = [list(measured)[i] for i in thinned(list(measured), _MOST_RANKS)]
    predicted = predicted_memory(run.plan)
    rows = [(f"rank {rank}", measured[rank]) for rank in ranks]
    rows = [*([("predicted", predicted)] if predicted else []), *rows]
    kinds = [kind for kind in (*KINDS, _REST) if any(kind in row for _, row in rows)]
    beside = [name for name in _OF_PROCESS if any(name in row for _, row in rows)]
    shown = kinds or ["peak" if "peak" in beside else "host"]
    mark = sum(predicted.values()) if predicted else None
    scale = max(sum(row.get(kind, 0.0) for kind in shown) for _, row in rows)
    bars = []
    for label, row in rows:
        together = sum(row.get(kind, 0.0) for kind in shown)
        cells = [together, *(row.get(name) for name in (*kinds, *beside))]
        parts = [(kind, number, row.get(kind, 0.0)) for number, kind in enumerate(shown)]
        words = ["" if cell is None else amount(cell, "bytes") for cell in cells]
        bars.append(stacked(label, parts, scale, "bytes", words, mark))
    head = ("rank", "memory", "together", *kinds, *(name.replace("_", " ") for name in beside))
    legend = tuple((kind, number) for number, kind in enumerate(shown))
    return BarTable("Bytes that each rank held, the most of each kind over the run", head, legend, tuple(bars))


def predicted_memory(plan: Mapping[str, Any] | None) -> dict[str, float]:
    """Bytes by kind that plan.json predicts for the rank that needs most; {} if it does not."""
    chosen = (plan or {}).get("chosen")
    found = chosen.get("bytes") if isinstance(chosen, Mapping) else None
    if not isinstance(found, Mapping):
        return {}
    return {kind: value for kind in KINDS if (value := number_of(found.get(kind))) is not None}


def _most_held(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
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
