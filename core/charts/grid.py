"""Grid of the ranks of a layout."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.core.charts.drawing import COLOURS
from trainwright.core.layout import Layout

_MOST_CELLS = 1024


@dataclass(frozen=True)
class Cell:
    """A rank in the grid: its number, the colour of its stage and its coordinates."""

    rank: int
    colour: int
    places: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """The ranks of a layout, one row per pipeline stage and replica.

    Args:
        title: the axes.
        rows: label and ranks of each.
        left_out: number of ranks not shown.
    """

    title: str
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    left_out: int


def grid(layout: Layout | None) -> Grid | None:
    """Return the grid of a layout; None if the layout is unknown."""
    if layout is None:
        return None
    axes = [axis for axis, size in layout.sizes.items() if size > 1]
    outer = [axis for axis in ("pipeline", "replicate") if axis in axes]
    if len(axes) == len(outer) and len(outer) > 1 or outer == ["replicate"] == axes:
        outer = outer[:-1]
    rows: dict[str, list[Cell]] = {}
    shown = min(layout.world_size, _MOST_CELLS)
    for rank in range(shown):
        place = layout.coordinates(rank)
        label = ", ".join(f"{_word(axis)} {place[axis]}" for axis in outer)
        inner = [f"{_word(axis)} {place[axis]}" for axis in (*axes, *(["expert"] if layout.expert > 1 else []))]
        places = tuple(text for text in inner if text not in label.split(", "))
        colour = place["pipeline"] if layout.pipeline > 1 else layout.data_rank(rank)
        rows.setdefault(label, []).append(Cell(rank, colour % COLOURS, places or ("everything",)))
    return Grid(str(layout), tuple((label, tuple(cells)) for label, cells in rows.items()), layout.world_size - shown)


def _word(axis: str) -> str:
    return {"pipeline": "stage", "replicate": "copy", "context": "sequence part", "expert": "experts"}.get(axis, axis)
