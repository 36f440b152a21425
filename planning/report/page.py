"""A plan as one page of HTML that needs no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainwright.core.charts.drawing import BarTable, amount, stacked
from trainwright.core.charts.grid import grid
from trainwright.core.charts.html import render
from trainwright.planning.memory.peak import KINDS
from trainwright.planning.report.table import SHOWN, cells_of, command_of, grouped, headline
from trainwright.planning.search.plan import USABLE, Plan

_TIMES = {
    "compute": "computing",
    "exposed": "waiting to send",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
}
_COLUMNS = (
    "#", "layout", "s/step", "samples/s", "MFU", "waits", "bubble", "GiB", "micro-batch", "accumulation", "with",
)  # fmt: skip
_MOST_REFUSED = 20


def as_page(plan: Plan) -> str:
    """Return the page: bars of time and of memory for the first layouts, a table, and which ones are not possible."""
    shown = plan.ranked[:SHOWN]
    labels = [f"{number}. {each.title}" for number, each in enumerate(shown, 1)]
    times = [{title: getattr(each.time, name) for name, title in _TIMES.items()} for each in shown]
    memory = [{kind: getattr(each.memory, kind) for kind in KINDS} for each in shown]
    limit = USABLE * plan.profile.memory_bytes
    return render(
        "plan.html.j2",
        title=f"Plan of {plan.name}",
        headline=headline(plan),
        times=_bars("Seconds of a step", labels, times, "seconds"),
        memory=_bars(
            "Memory of the fullest rank; the line is what its device has for it", labels, memory, "bytes", limit
        ),
        grid=grid(shown[0].layout) if shown else None,
        command=command_of(shown[0]) if shown else "",
        columns=_COLUMNS,
        rows=[(str(number), *cells_of(plan, each)) for number, each in enumerate(shown, 1)],
        notes=plan.notes,
        refused=[(kind, group[:_MOST_REFUSED], len(group)) for kind, group in grouped(plan.refused).items()],
    )


def _bars(
    caption: str, labels: Sequence[str], rows: Sequence[Mapping[str, float]], unit: str, limit: float | None = None
) -> BarTable | None:
    if not rows:
        return None
    scale = max(limit or 0.0, *(sum(row.values()) for row in rows))
    legend = tuple((name, number) for number, name in enumerate(rows[0]))
    bars = [
        stacked(
            label,
            [(name, number, row[name]) for name, number in legend],
            scale,
            unit,
            [amount(sum(row.values()), unit)],
            limit,
        )
        for label, row in zip(labels, rows, strict=True)
    ]
    return BarTable(caption, ("layout", unit, "together"), legend, tuple(bars))
