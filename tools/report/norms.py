"""Norms of gradients and of parameters by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainwright.core.charts.drawing import COLOURS, CurveChart, curve_chart, exact, thinned
from trainwright.tools.report.records import RunRecord

_NORMS = {"grad": "L2 norm of gradients", "param": "L2 norm of parameters"}
_ALL = "all"


@dataclass(frozen=True)
class NormCharts:
    """Norms by block.

    Args:
        charts: of gradients and of parameters, a curve for each block that is drawn and for all together.
        rows: block, newest norm of gradient and of parameters, and the first as a part of the second.
        left_out: blocks that have no curve.
    """

    charts: tuple[CurveChart, ...]
    rows: tuple[tuple[str, ...], ...]
    left_out: int


def norms(run: RunRecord) -> NormCharts | None:
    """Norms of gradients and parameters by block; None if none were logged."""
    by_block = {what: _of_blocks(run.metrics, f"norm/{what}/") for what in _NORMS}
    blocks = list(dict.fromkeys(block for each in by_block.values() for block in each))
    if not blocks:
        return None
    apart = [block for block in blocks if block != _ALL]
    shown = [*(block for block in (_ALL,) if block in blocks), *(apart[i] for i in thinned(apart, COLOURS - 1))]
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
    """Whether a metric is one of those that :func:`norms` shows."""
    return name.startswith(tuple(f"norm/{what}/" for what in _NORMS))


def _of_blocks(metrics: Mapping[str, list[tuple[int, float]]], before: str) -> dict[str, list[tuple[int, float]]]:
    return {name.removeprefix(before): values for name, values in metrics.items() if name.startswith(before) and values}


def _last(values: Sequence[tuple[int, float]] | None) -> float | None:
    return values[-1][1] if values else None
