"""A plan as one page of HTML that needs no other file."""

from __future__ import annotations

from html import escape
from itertools import islice

from trainwright.planning.memory.peak import KINDS
from trainwright.planning.report.table import SHOWN, cells_of, command_of, grouped, headline
from trainwright.planning.search.plan import USABLE, Candidate, Plan

_GIB = 2**30
_TIMES = ("compute", "exposed", "bubble", "optimizer")
_TIME_NAMES = {
    "compute": "computing",
    "exposed": "waiting to send",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
}
# Apart from each other for eyes that see no red or green, on white and on black (Okabe and Ito, 2008).
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#8c8c8c")
_COLUMNS = (
    "#", "layout", "s/step", "samples/s", "MFU", "waits", "bubble", "GiB", "micro-batch", "accumulation", "with",
)  # fmt: skip
_WIDTH, _ROW, _BAR, _LEFT = 720, 34, 18, 250
_MOST_RANKS = 64

_STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --soft: #555; --line: #ccc; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --text: #eee; --soft: #aaa; --line: #444; --page: #161616; } }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; color: var(--text); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--text); font-size: 12px; }
svg .soft { fill: var(--soft); } svg .line { stroke: var(--soft); stroke-dasharray: 4 3; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:nth-child(2), td:nth-child(2) { text-align: left; }
code { display: block; padding: .7rem; border: 1px solid var(--line); border-radius: 4px; overflow-wrap: anywhere; }
.key { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; color: var(--soft); font-size: .9rem; padding: 0; }
.key li { list-style: none; } .key span { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
"""


def as_page(plan: Plan) -> str:
    """The page: a bar of time and one of memory for each of the first layouts, a table, and what is not possible."""
    head, count = headline(plan)
    shown = plan.ranked[:SHOWN]
    parts = [f"<h1>{escape(head)}</h1>", f"<p>{escape(count)}</p>"]
    if shown:
        parts += [
            "<h2>Seconds of a step</h2>",
            _key([_TIME_NAMES[name] for name in _TIMES]),
            _bars(shown, [[getattr(each.time, name) for name in _TIMES] for each in shown], "s", None),
            "<h2>GiB of the fullest rank</h2>",
            _key(KINDS),
            _bars(
                shown,
                [[getattr(each.memory, kind) / _GIB for kind in KINDS] for each in shown],
                "GiB",
                USABLE * plan.profile.memory_bytes / _GIB,
            ),
            f"<h2>Ranks of the first</h2>{_grid(shown[0])}",
            f"<h2>To type for the first</h2><code>{escape(command_of(shown[0]))}</code>",
            "<h2>The first layouts</h2>",
            _table(plan, shown),
        ]
    parts += [f"<p>{escape(note)}</p>" for note in plan.notes]
    if plan.refused:
        parts += ["<h2>Not possible</h2>", _refused(plan)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Plan of {escape(plan.name)}</title><style>{_STYLE}</style></head><body>"
        + "\n".join(parts)
        + "</body></html>\n"
    )


def _key(names: tuple[str, ...] | list[str]) -> str:
    marks = (
        f'<li><span style="background:{colour}"></span>{escape(name)}</li>'
        for name, colour in zip(names, _COLOURS, strict=False)
    )
    return f'<ul class="key">{"".join(marks)}</ul>'


def _bars(shown: tuple[Candidate, ...], values: list[list[float]], unit: str, limit: float | None) -> str:
    """Stacked horizontal bars, one for each layout; `limit` is a line."""
    most = max([sum(row) for row in values] + ([limit] if limit is not None else [])) or 1.0
    room = _WIDTH - _LEFT - 70
    height = _ROW * len(shown) + 4
    lines = []
    for index, (candidate, row) in enumerate(zip(shown, values, strict=True)):
        top, left = index * _ROW + 8, float(_LEFT)
        label = f"{index + 1}. {candidate.title}"
        cut = label if len(label) <= 42 else label[:41] + "…"
        lines.append(f'<text x="0" y="{top + 13}"><title>{escape(label)}</title>{escape(cut)}</text>')
        for colour, value in zip(_COLOURS, row, strict=False):
            width = room * value / most
            lines.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{colour}">'
                f"<title>{value:.3g} {unit}</title></rect>"
            )
            left += width
        lines.append(f'<text class="soft" x="{left + 6:.1f}" y="{top + 13}">{sum(row):.3g} {unit}</text>')
    if limit is not None:
        at = _LEFT + room * limit / most
        lines.append(f'<line class="line" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height}"/>')
    title = "stacked bars, one for each layout; the table below has the numbers"
    return (
        f'<div class="scroll"><svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{title}" '
        f'style="min-width:32rem">{"".join(lines)}</svg></div>'
    )


def _grid(candidate: Candidate) -> str:
    """The first ranks as squares: a row for each stage and replica, colours for parts of a weight."""
    layout = candidate.layout
    count = min(layout.world_size, _MOST_RANKS)
    columns = min(count, max(layout.tensor * layout.context * min(layout.shard, 8), 8))
    size = 40
    squares = []
    for rank in range(count):
        place = layout.coordinates(rank)
        x, y = rank % columns * size, rank // columns * size
        named = (
            ", ".join(f"{axis} {place[axis]}" for axis, length in layout.sizes.items() if length > 1) or "everything"
        )
        colour = _COLOURS[place["tensor"] % len(_COLOURS)]
        squares.append(
            f'<rect x="{x + 2}" y="{y + 2}" width="{size - 4}" height="{size - 4}" fill="{colour}" opacity="0.55">'
            f"<title>rank {rank}: {named}</title></rect>"
            f'<text x="{x + size / 2}" y="{y + size / 2 + 4}" text-anchor="middle">{rank}</text>'
        )
    rows = -(-count // columns)
    more = f"<p>and {layout.world_size - count} more ranks</p>" if layout.world_size > count else ""
    return (
        f'<div class="scroll"><svg viewBox="0 0 {columns * size} {rows * size}" role="img" '
        f'aria-label="the first {count} ranks of {escape(candidate.title)}" '
        f'style="max-width:{columns * size}px;min-width:{min(columns * size, 320)}px">{"".join(squares)}</svg></div>'
        + more
    )


def _table(plan: Plan, shown: tuple[Candidate, ...]) -> str:
    rows = []
    for number, each in enumerate(shown, 1):
        cells = (str(number), *cells_of(plan, each))
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    header = "".join(f'<th scope="col">{name}</th>' for name in _COLUMNS)
    return f'<div class="scroll"><table><tr>{header}</tr>{"".join(rows)}</table></div>'


def _refused(plan: Plan) -> str:
    lines = []
    for kind, group in grouped(plan.refused).items():
        lines.append(f"<h3>{kind}: {len(group)}</h3><ul>")
        lines += [f"<li>{escape(each.what)}: {escape(each.reason)}</li>" for each in islice(group, 20)]
        lines += [f"<li>and {len(group) - 20} more</li>"] if len(group) > 20 else []
        lines.append("</ul>")
    return "\n".join(lines)
