"""Geometry of charts: curves, stacked bars and marks on a time axis.

Templates draw the charts as SVG, with lengths in percent of the width, so that they fit a phone at constant font size.
Colours are classes (`c0` to `c7`) with values for dark and light in the style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainwright.core.text.sizes import size_text

# A curve has at most two points per bucket, about as many as a wide screen has pixels for it.
_BUCKETS = 400
_TABLE_ROWS = 40
COLOURS = 8
# Most seconds shown as hours: 300 years.
_LONGEST = 1e10
# Side of the coordinate system of a curve chart, which is stretched to the available space.
_SPAN = 1000

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Tick:
    """A labelled position on an axis.

    Args:
        at: percent of the axis, from the left or the top.
        label: its text.
        anchor: of the text: start, middle or end.
    """

    at: float
    label: str
    anchor: str = "middle"


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Args:
        label: for the legend.
        colour: index of its colour.
        path: SVG path data.
        points: number of values.
        last: the newest value.
        least: the smallest one.
        greatest: the largest one.
    """

    label: str
    colour: int
    path: str
    points: int
    last: float
    least: float
    greatest: float


@dataclass(frozen=True)
class CurveChart:
    """Curves over steps.

    Args:
        title: quantity and unit.
        curves: none of them empty.
        x_ticks: below.
        y_ticks: at the left.
        rows: some of the values as a table: the step, then a value or None for each curve.
        thinned: whether `rows` omits some.
    """

    title: str
    curves: tuple[Curve, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    rows: tuple[tuple[float, tuple[float | None, ...]], ...]
    thinned: bool

    @property
    def described(self) -> str:
        """Text alternative for screen readers."""
        parts = [
            f"{curve.label}: {curve.points} values, from {short(curve.least)} to {short(curve.greatest)}, "
            f"last {short(curve.last)}"
            for curve in self.curves
        ]
        return f"{self.title} by step. {'; '.join(parts)}."


@dataclass(frozen=True)
class BarPart:
    """One part of a bar.

    Args:
        label: of the part.
        colour: index of its colour; a name for a special one (`bubble`).
        at: start, in percent.
        width: percent.
        text: tooltip.
    """

    label: str
    colour: int | str
    at: float
    width: float
    text: str


@dataclass(frozen=True)
class Bar:
    """A table row with a bar.

    Args:
        label: of the row.
        parts: from left to right.
        cells: texts beside the bar.
        mark: position of a predicted value, in percent; None: no mark.
    """

    label: str
    parts: tuple[BarPart, ...]
    cells: tuple[str, ...]
    mark: float | None = None


@dataclass(frozen=True)
class BarTable:
    """Bars with a common scale, in a table with their numbers.

    Args:
        caption: of the table.
        head: column titles: of labels, bars and cells.
        legend: (label, colour) of the parts.
        bars: the rows.
    """

    caption: str
    head: tuple[str, ...]
    legend: tuple[tuple[str, int | str], ...]
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Mark:
    """An event on a time axis: position (percent), kind and text."""

    at: float
    kind: str
    text: str


def curve_chart(title: str, curves: Mapping[str, tuple[int, Points]]) -> CurveChart | None:
    """Return a chart of curves; None if no curve has a value.

    Args:
        title: quantity and unit.
        curves: label -> (index of the colour, (step, value) in the order of steps).
    """
    known = {label: (colour, values) for label, (colour, values) in curves.items() if values}
    if not known:
        return None
    xs = [x for _, values in known.values() for x in (values[0][0], values[-1][0])]
    ys = [y for _, values in known.values() for _, y in values]
    left, right = _widened(min(xs), max(xs))
    bottom, top = _widened(min(ys), max(ys))
    steps = ticks(left, right, 5)
    heights = ticks(bottom, top, 4)
    drawn = []
    for label, (colour, values) in known.items():
        numbers = [y for _, y in values]
        path = _path(downsampled(values), (left, right), (bottom, top))
        drawn.append(Curve(label, colour, path, len(values), numbers[-1], min(numbers), max(numbers)))
    rows, thinned = _rows([values for _, values in known.values()])
    return CurveChart(
        title,
        tuple(drawn),
        tuple(_x_tick(_percent(x, left, right), short(x)) for x in steps),
        tuple(Tick(100 - _percent(y, bottom, top), short(y)) for y in heights),
        rows,
        thinned,
    )


def downsampled(values: Points, buckets: int = _BUCKETS) -> list[tuple[float, float]]:
    """Return the least and greatest value of each bucket, so that no peak is lost."""
    if len(values) <= 2 * buckets:
        return list(values)
    kept: list[tuple[float, float]] = []
    for bucket in range(buckets):
        piece = values[len(values) * bucket // buckets : len(values) * (bucket + 1) // buckets]
        least, greatest = (pick(range(len(piece)), key=lambda i: piece[i][1]) for pick in (min, max))
        kept += [piece[i] for i in sorted({least, greatest})]
    return kept


def thinned(values: Sequence[object], most: int) -> list[int]:
    """Return at most `most` evenly spread indices of values, the first and the last included."""
    if len(values) <= most:
        return list(range(len(values)))
    return sorted({round(i * (len(values) - 1) / (most - 1)) for i in range(most)})


def stacked(
    caption: str,
    head: Sequence[str],
    colours: Mapping[str, int],
    rows: Sequence[tuple[str, Mapping[str, float], Sequence[str]]],
    unit: str,
    mark: float | None = None,
) -> BarTable:
    """Return bars of stacked parts with a common scale.

    Args:
        caption, head: of the table.
        colours: part -> index of its colour, from left to right.
        rows: label, size of each part, and texts beside the bar.
        unit: for `amount`: "bytes" or "seconds".
        mark: a size to mark in each row; None: none.
    """
    scale = max([mark or 0.0, *(sum(sizes.get(part, 0.0) for part in colours) for _, sizes, _ in rows)])
    place = None if mark is None or scale <= 0 else round(100 * mark / scale, 3)
    bars = []
    for label, sizes, cells in rows:
        at, drawn = 0.0, []
        for what, colour in colours.items():
            size = sizes.get(what, 0.0)
            width = 100 * size / scale if scale > 0 else 0.0
            if width > 0:
                drawn.append(BarPart(what, colour, round(at, 3), round(width, 3), f"{what}: {amount(size, unit)}"))
            at += width
        bars.append(Bar(label, tuple(drawn), tuple(cells), place))
    return BarTable(caption, tuple(head), tuple(colours.items()), tuple(bars))


def marks(events: Sequence[tuple[float, str, str]]) -> tuple[tuple[Mark, ...], tuple[Tick, ...]]:
    """Return marks and axis labels of events: (seconds since the beginning, kind, text)."""
    end = max((time for time, _, _ in events), default=0.0) or 1.0
    found = tuple(Mark(round(100 * max(time, 0.0) / end, 3), kind, text) for time, kind, text in events)
    return found, tuple(_x_tick(100 * second / end, duration(second)) for second in ticks(0.0, end, 6))


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Return about `wanted` round numbers from `low` to `high`."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / max(wanted, 1)
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * base for factor in (1, 2, 5, 10) if factor * base >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """Format a number in a few characters: 1.2k, 3.45, 6e-05."""
    size = abs(value)
    if size and size < 1e-3:
        return f"{value:.3g}"
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.4g}{letter}"
    return f"{value:.4g}"


def exact(value: float) -> str:
    """Format a number with six digits, or all of an integer: 2.37598, 918,528."""
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.6g}"


def amount(value: float, unit: str) -> str:
    """Format a size with its unit: bytes as MiB and so on, seconds as ms or s."""
    if unit == "bytes":
        return size_text(value, digits=2)
    return f"{value * 1000:.4g} ms" if abs(value) < 1 else f"{value:.4g} s"


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: 1:02:03, 2:05, 12 s."""
    if not 60 <= seconds < _LONGEST:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _rows(curves: Sequence[Points]) -> tuple[tuple[tuple[float, tuple[float | None, ...]], ...], bool]:
    by_step = [dict(values) for values in curves]
    steps = sorted(set().union(*by_step))
    places = thinned(steps, _TABLE_ROWS)
    rows = tuple((steps[i], tuple(each.get(steps[i]) for each in by_step)) for i in places)
    return rows, len(places) < len(steps)


def _path(values: Points, across: tuple[float, float], up: tuple[float, float]) -> str:
    places = [
        f"{_percent(x, *across) * _SPAN / 100:.1f} {_SPAN - _percent(y, *up) * _SPAN / 100:.1f}" for x, y in values
    ]
    # A single value is a line of length 0, drawn as a dot by round line caps.
    return f"M{places[0]}h0" if len(places) == 1 else "M" + "L".join(places)


def _widened(low: float, high: float) -> tuple[float, float]:
    if high > low:
        return low, high
    by = abs(low) * 0.05 or 1.0
    return low - by, high + by


def _percent(value: float, low: float, high: float) -> float:
    return round(100 * (value - low) / (high - low), 3)


def _x_tick(at: float, label: str) -> Tick:
    return Tick(round(at, 3), label, "start" if at < 4 else "end" if at > 96 else "middle")
