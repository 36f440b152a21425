"""HTML page of `trainwright report`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

from trainwright.core.charts.drawing import COLOURS, CurveChart, Points, curve_chart
from trainwright.core.charts.grid import grid
from trainwright.core.charts.html import render
from trainwright.tools.report import charts, facts
from trainwright.tools.report.pipeline import pipeline
from trainwright.tools.report.plain import text_of
from trainwright.tools.report.records import RunRecord, read_run

PAGE_FILE = "report.html"
_TIME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")  # of a run directory
# Charts of a section; the rest is only named.
_MOST_CHARTS = 24
_RATES = ("_per_second", "step_seconds", "mfu", "goodput")
# Functions of a run that the templates call.
_SHOWN = {**vars(charts), **vars(facts), "grid": grid, "pipeline": pipeline, "text_of": text_of}


@dataclass(frozen=True)
class PageContent:
    """Content of the page template.

    Args:
        title: of the page.
        runs: shown side by side.
        losses: charts over all runs.
        rates: charts over all runs.
        others: charts over all runs.
        left_out: names of metrics without a chart.
    """

    title: str
    runs: Sequence[RunRecord]
    losses: list[CurveChart] = field(default_factory=list)
    rates: list[CurveChart] = field(default_factory=list)
    others: list[CurveChart] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def build_page(run_dirs: Sequence[Path]) -> str:
    """Return the HTML of one or several run directories."""
    runs = [read_run(path, label) for path, label in zip(run_dirs, labels_of(run_dirs), strict=True)]
    content = content_of(runs)
    return render("report.html.j2", title=content.title, content=content, show=_SHOWN)


def write_page(run_dirs: Sequence[Path], out: Path) -> None:
    """Build a page and write it atomically.

    Raises:
        OSError: if it cannot be written.
    """
    page = build_page(run_dirs)
    # A random name, at which no link can have been placed.
    partial = out.with_name(f"{out.name}.{token_hex(8)}.partial")
    try:
        with partial.open("x", encoding="utf-8", errors="replace") as file:
            file.write(page)
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)


def labels_of(run_dirs: Sequence[Path]) -> list[str]:
    """Return unique short labels of run directories: distinct path suffixes; equal paths are numbered.

    A run directory that is named by its time has the name of its recipe, too.
    """
    parts = [path.absolute().parts for path in run_dirs]
    length = 1 + any(_TIME.match(part[-1]) is not None for part in parts)
    while length < max(map(len, parts)) and len({part[-length:] for part in parts}) < len({*parts}):
        length += 1
    names = ["/".join(part[-length:]) for part in parts]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def content_of(runs: Sequence[RunRecord]) -> PageContent:
    """Sort logged metrics into sections of charts."""
    content = PageContent(f"{', '.join(run.label for run in runs)} - Trainwright report", runs)
    rated = [facts.rates(run) for run in runs]
    names = list(dict.fromkeys(name for run in runs for name in sorted(run.metrics)))
    for name in sorted(names, key=lambda name: (name != "loss", name != "val_loss")):
        if name == "epoch" or charts.is_norm(name):
            continue
        is_loss, is_rate = "loss" in name.lower(), name.endswith(_RATES)
        section = content.losses if is_loss else content.rates if is_rate else content.others
        _draw(content, section, name, {run.label: run.metrics.get(name, []) for run in runs})
    drawn = {chart.title for chart in content.rates}
    for name in dict.fromkeys(name for each in rated for name in each if name not in drawn):
        _draw(content, content.rates, name, {run.label: rated[n].get(name, []) for n, run in enumerate(runs)})
    return content


def _draw(content: PageContent, section: list[CurveChart], name: str, curves: Mapping[str, Points]) -> None:
    """Add a chart over all runs to a section, if a run has values and there is room."""
    if not any(curves.values()):
        return
    if len(section) >= _MOST_CHARTS:
        content.left_out.append(name)
        return
    chart = curve_chart(name, {label: (n % COLOURS, values) for n, (label, values) in enumerate(curves.items())})
    assert chart is not None
    section.append(chart)
