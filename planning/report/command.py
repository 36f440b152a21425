"""The verb `plan`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

from omegaconf import DictConfig
from rich.console import Console

from trainwright.core.charts.drawing import BarTable, amount, stacked
from trainwright.core.charts.grid import grid
from trainwright.core.charts.html import render, write_page
from trainwright.planning.memory.peak import KINDS
from trainwright.planning.report.table import SHOWN, as_dict, cells_of, command_of, grouped, headline, print_plan
from trainwright.planning.search.plan import USABLE, Plan
from trainwright.planning.search.search import plan

_TIMES = {"compute": "compute", "exposed": "communication", "bubble": "pipeline bubble", "optimizer": "optimizer"}
_COLUMNS = (
    "#", "layout", "s/step", "samples/s", "MFU", "waits", "bubble", "GiB", "micro-batch", "accumulation", "with",
)  # fmt: skip
_MOST_REFUSED = 20


def run_plan(cfg: DictConfig, *, as_json: bool = False, html: str | None = None) -> bool:
    """Plan, and print the layouts.

    Args:
        cfg: composed.
        as_json: print one JSON document on standard output, and nothing else.
        html: file of a page to write; None: none.

    Returns:
        Whether a layout is possible.

    Raises:
        ConfigError: if nothing can be planned, or the page cannot be written.
    """
    found = plan(cfg)
    if html is not None:
        write_page(as_page(found), html, "--html")
    if as_json:
        print(json.dumps(as_dict(found), allow_nan=False), flush=True)
        return found.best is not None
    print_plan(found, Console(file=sys.stdout, highlight=False))
    if html is not None:
        print(f"\npage: {html}", flush=True)
    return found.best is not None


def as_page(plan: Plan) -> str:
    """Return the HTML page: bars of time and memory of the first layouts, a table, and the refused layouts."""
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
            "Peak memory of the largest rank; the line is the usable device memory", labels, memory, "bytes", limit
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
    colours = {name: number for number, name in enumerate(rows[0])}
    drawn = [(label, row, [amount(sum(row.values()), unit)]) for label, row in zip(labels, rows, strict=True)]
    return stacked(caption, ("layout", unit, "total"), colours, drawn, unit, limit)
