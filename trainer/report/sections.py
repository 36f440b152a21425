"""From what is known of a run to what the page shows of it: tables and pictures, with the numbers of the files."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

from trainwright.strategies.layout import Layout
from trainwright.trainer.report.charts import (
    COLOURS,
    Bar,
    BarTable,
    CurveChart,
    Mark,
    Part,
    Tick,
    amount,
    curve_chart,
    duration,
    exact,
    marks,
    short,
    stacked,
    thinned,
)
from trainwright.trainer.report.files import number_of
from trainwright.trainer.report.records import Event, RunRecord

PARTS = ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "other")
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
_OF_PROCESS = ("peak", "allocated", "reserved", "host", "host_peak")
_REST = "other allocated"
_MOST_BARS = 24
_MOST_RANKS = 64
_MOST_CELLS = 1024
_MOST_EVENTS = 200
_MOST_ENTRIES = 2000


@dataclass(frozen=True)
class Fact:
    """A number at the top of the page, and what it is of."""

    name: str
    value: str


@dataclass(frozen=True)
class Cell:
    """A rank in the picture of the layout: its number, the colour of its stage and what it does."""

    rank: int
    colour: int
    places: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """The ranks of a layout, a row for each stage of the pipeline and copy of the state.

    Args:
        title: the axes.
        rows: label and ranks of each.
        left_out: ranks that are not shown.
    """

    title: str
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    left_out: int


@dataclass(frozen=True)
class Story:
    """What happened, on an axis of time and as a table.

    Args:
        marks: on the axis.
        ticks: of the axis.
        began: when its zero was, in words.
        rows: when, step, kind, rank, what, seconds.
        left_out: events that are not shown.
    """

    marks: tuple[Mark, ...]
    ticks: tuple[Tick, ...]
    began: str
    rows: tuple[tuple[str, str, str, str, str, str], ...]
    left_out: int

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those that occur, in the order of their first."""
        return tuple(dict.fromkeys(mark.kind for mark in self.marks))


@dataclass(frozen=True)
class Pipeline:
    """A sampled step of the pipeline.

    Args:
        table: a row per rank, with the stages that it has.
        entries: (stage, what, micro-batch, from, to), seconds since the step began.
        left_out: entries that are not listed.
        step: that was sampled; None if it was not said.
    """

    table: BarTable
    entries: tuple[tuple[str, str, str, str, str], ...]
    left_out: int
    step: int | None


@dataclass(frozen=True)
class Norms:
    """Norms by block.

    Args:
        charts: of gradients and of parameters, a curve for each block that is drawn and for all together.
        rows: block, newest norm of gradient and of parameters, and the first as a part of the second.
        left_out: blocks that have no curve.
    """

    charts: tuple[CurveChart, ...]
    rows: tuple[tuple[str, ...], ...]
    left_out: int


def facts(run: RunRecord) -> list[Fact]:
    """The first numbers that a person looks for; what was not measured is left out."""
    found = []
    if run.last_step is not None:
        most = number_of(run.config.get("max_steps"))
        found.append(Fact("last step logged", f"{run.last_step}" + ("" if most is None else f" (to do: {most:.0f})")))
    for name in ("loss", "val_loss"):
        if run.metrics.get(name):
            found.append(Fact(f"last {name}", exact(run.metrics[name][-1][1])))
    for name, values in run.metrics.items():
        if name.endswith("_per_second") and values:
            found.append(Fact(name.replace("_", " "), short(values[-1][1])))
    mfu = newest(run, "rate", "mfu")
    if mfu is not None:
        found.append(Fact("MFU", f"{100 * mfu:.3g} %"))
    share = newest(run, "goodput", "share")
    if share is not None:
        found.append(Fact("goodput", f"{100 * share:.3g} %"))
    if run.layout is not None:
        found.append(Fact("ranks", str(run.layout.world_size)))
    # Of a fault that the launching process tells of, ranks that outlived it tell too.
    told = [event.rank for event in run.events if event.what == "fault"]
    faults = told.count(None) or len(told)
    back = sum(event.what in ("recovered", "rollback") for event in run.events)
    if faults or back:
        found.append(Fact("faults, recoveries", f"{faults}, {back}"))
    found.append(Fact("checkpoints kept", str(len(run.checkpoints))))
    return found


def newest(run: RunRecord, kind: str, name: str) -> float | None:
    """The newest value that any rank has noted; None if there is none."""
    found = None
    for _, record in run.records(kind):
        value = number_of(record.get(name))
        if value is not None and (found is None or _time(record) >= found[0]):
            found = (_time(record), value)
    return None if found is None else found[1]


def rates(run: RunRecord) -> dict[str, list[tuple[float, float]]]:
    """Values of `rate` records of the first rank that has them, by name: (step, value)."""
    found: dict[str, list[tuple[float, float]]] = {}
    first = None
    for rank, record in run.records("rate"):
        step = number_of(record.get("step"))
        first = rank if first is None else first
        if rank != first or step is None:
            continue
        for name, value in record.items():
            number = number_of(value) if name not in ("time", "step", "kind") else None
            if number is not None:
                found.setdefault(name, []).append((step, number))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Time


def time_by_step(run: RunRecord) -> BarTable | None:
    """Where the time of steps went, window by window: seconds of a step, averaged over ranks."""
    windows: dict[int, list[dict[str, float]]] = {}
    for _, record in run.records("step"):
        per_step = _per_step(record)
        step = number_of(record.get("step"))
        if per_step is not None and step is not None:
            windows.setdefault(int(step), []).append(per_step)
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
            seconds, count = _seconds(record), number_of(record.get("steps")) or 1.0
            for part, value in seconds.items():
                spent[part] = spent.get(part, 0.0) + value
            steps += count if seconds else 0.0
        if steps:
            rows.append((f"rank {rank}", {part: value / steps for part, value in spent.items()}))
    if not rows:
        return None
    shown = [rows[i] for i in thinned(rows, _MOST_RANKS)]
    return _time_table("Seconds of an optimizer step by rank, mean over steps", "rank", shown)


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


def _per_step(record: Mapping[str, Any]) -> dict[str, float] | None:
    seconds, steps = _seconds(record), number_of(record.get("steps")) or 1.0
    return {part: value / steps for part, value in seconds.items()} if seconds else None


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: sum(row.get(part, 0.0) for row in rows) / len(rows) for part in PARTS}


# ---------------------------------------------------------------------------------------------------------------------
# Memory


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
        bar = stacked(label, parts, scale, "bytes", ["" if cell is None else amount(cell, "bytes") for cell in cells])
        bars.append(replace(bar, mark=None if mark is None or not scale else round(100 * mark / scale, 3)))
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


def predicted_seconds(run: RunRecord) -> tuple[float, float | None] | None:
    """Seconds of a step that plan.json predicts, and the middle of those that were measured; None without the first."""
    chosen = (run.plan or {}).get("chosen")
    seconds = chosen.get("seconds") if isinstance(chosen, Mapping) else None
    predicted = number_of(seconds.get("step")) if isinstance(seconds, Mapping) else None
    measured = [value for _, value in run.metrics.get("step_seconds", [])]
    return None if predicted is None else (predicted, median(measured) if measured else None)


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


# ---------------------------------------------------------------------------------------------------------------------
# Norms


def norms(run: RunRecord) -> Norms | None:
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
    return Norms(tuple(charts), tuple(rows), len(blocks) - len(shown))


def is_norm(name: str) -> bool:
    """Whether a metric is one of those that :func:`norms` shows."""
    return name.startswith(tuple(f"norm/{what}/" for what in _NORMS))


_NORMS = {"grad": "L2 norm of gradients", "param": "L2 norm of parameters"}
_ALL = "all"


def _of_blocks(metrics: Mapping[str, list[tuple[int, float]]], before: str) -> dict[str, list[tuple[int, float]]]:
    return {name.removeprefix(before): values for name, values in metrics.items() if name.startswith(before) and values}


def _last(values: Sequence[tuple[int, float]] | None) -> float | None:
    return values[-1][1] if values else None


# ---------------------------------------------------------------------------------------------------------------------
# Layout and pipeline


def grid(layout: Layout | None) -> Grid | None:
    """The ranks as a picture; None if the layout is not known."""
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


def pipeline(run: RunRecord) -> Pipeline | None:
    """The newest step whose timeline was sampled; None if none was."""
    sampled = _sampled(run)
    if not sampled:
        return None
    step, by_rank = sampled
    # A rank works at one stage at a time: in a row for each of its stages it would seem idle while it does another.
    rows = {_place_of(rank, entries): sorted(entries) for rank, entries in by_rank.items()}
    begin = min(entry[0] for entries in rows.values() for entry in entries)
    span = max(entry[1] for entries in rows.values() for entry in entries) - begin
    if span <= 0:
        return None
    ordered = sorted(rows, key=_numbers)
    words = list(dict.fromkeys(what for label in ordered for _, _, what, _, _ in rows[label]))
    colours = {what: _colour_of(what, number) for number, what in enumerate(words)}
    bars = [_rank_bar(label, rows[label], begin, span, colours) for label in ordered]
    legend: tuple[tuple[str, int | str], ...] = (*colours.items(), ("bubble (idle)", "bubble"))
    listed = [
        (
            _stage_of(rank, stage),
            what,
            "" if micro_batch == _NONE else micro_batch,
            amount(start - begin, "seconds"),
            amount(end - begin, "seconds"),
        )
        for rank, entries in sorted(by_rank.items())
        for start, end, what, micro_batch, stage in sorted(entries)
    ]
    table = BarTable(
        "One optimizer step of the pipeline: what each rank did when", ("stage", "timeline", "busy", "idle", "bubble"),
        legend, tuple(bars)
    )  # fmt: skip
    return Pipeline(table, tuple(listed[:_MOST_ENTRIES]), max(len(listed) - _MOST_ENTRIES, 0), step)


_Entry = tuple[float, float, str, str, str]
# The number of no micro-batch, or of no single stage.
_NONE = "-1"


def _place_of(rank: int, entries: Sequence[_Entry]) -> str:
    stages = sorted({stage for *_, stage in entries if stage != _NONE}, key=_numbers)
    if len(stages) > 1:
        return f"stages {', '.join(stages)}, rank {rank}"
    return _stage_of(rank, stages[0] if stages else _NONE)


def _stage_of(rank: int, stage: str) -> str:
    return f"rank {rank}" if stage == _NONE else f"stage {stage}, rank {rank}"


def _sampled(run: RunRecord) -> tuple[int | None, dict[int, list[_Entry]]] | None:
    """The newest step for which most ranks have a timeline."""
    by_step: dict[int | None, dict[int, list[_Entry]]] = {}
    for rank, record in run.records("bubble"):
        raw, began = record.get("timeline"), number_of(record.get("began")) or 0.0
        items = raw[:_MOST_ENTRIES] if isinstance(raw, list) else []
        entries = [entry for item in items if (entry := _entry(item, began))]
        if entries:
            step = number_of(record.get("step"))
            by_step.setdefault(None if step is None else int(step), {})[rank] = entries
    if not by_step:
        return None
    step = max(by_step, key=lambda step: (len(by_step[step]), -1 if step is None else step))
    ranks = sorted(by_step[step])[:_MOST_RANKS]
    return step, {rank: by_step[step][rank] for rank in ranks}


def _entry(item: object, began: float) -> _Entry | None:
    if not isinstance(item, (list, tuple)) or len(item) < 5:
        return None
    start, end = number_of(item[0]), number_of(item[1])
    if start is None or end is None or end < start:
        return None
    return began + start, began + end, str(item[2])[:40], str(item[3])[:20], str(item[4])[:20]


def _rank_bar(label: str, entries: Sequence[_Entry], begin: float, span: float, colours: Mapping[str, int]) -> Bar:
    parts, busy, at = [], 0.0, begin
    for start, end, what, micro_batch, stage in entries:
        if start > at:
            parts.append(_idle(at, start, begin, span))
        which = "" if micro_batch == _NONE else f", micro-batch {micro_batch} of stage {stage}"
        text = f"{what}{which}: {amount(end - start, 'seconds')}"
        parts.append(Part(what, colours[what], _percent(start - begin, span), _percent(end - start, span), text))
        busy += max(end - max(start, at), 0.0)
        at = max(at, end)
    if at < begin + span:
        parts.append(_idle(at, begin + span, begin, span))
    idle = span - busy
    return Bar(
        label, tuple(parts), (amount(busy, "seconds"), amount(idle, "seconds"), f"{100 * idle / span:.3g} %")
    )  # fmt: skip


def _idle(start: float, end: float, begin: float, span: float) -> Part:
    text = f"bubble: {amount(end - start, 'seconds')} idle"
    return Part("bubble", "bubble", _percent(start - begin, span), _percent(end - start, span), text)


def _percent(value: float, whole: float) -> float:
    return round(100 * value / whole, 3)


def _colour_of(what: str, number: int) -> int:
    return {"forward": 0, "backward": 1}.get(what, 2 + number % (COLOURS - 2))


def _numbers(label: str) -> list[tuple[bool, int, str]]:
    words = label.replace(",", "").split()
    return [(not word.isdigit(), int(word) if word.isdigit() else 0, word) for word in words]


# ---------------------------------------------------------------------------------------------------------------------
# Events, configuration


def story(run: RunRecord) -> Story | None:
    """What happened; None if nothing was noted."""
    if not run.events:
        return None
    began, is_start = _began(run)
    places = thinned(run.events, _MOST_EVENTS)
    shown = [run.events[i] for i in places]
    drawn, ticks = marks([(event.time - began, event.what, _told(event)) for event in shown])
    word = "the first record" if is_start else "the first event"
    return Story(
        drawn,
        ticks,
        f"{word}, {datetime.fromtimestamp(began, UTC).strftime('%Y-%m-%d %H:%M:%S')} UTC",
        tuple(_event_row(event, began) for event in shown),
        len(run.events) - len(shown),
    )


def _began(run: RunRecord) -> tuple[float, bool]:
    times = [_time(records[0]) for records in run.monitor.values() if records]
    known = [time for time in times if 0 < time <= run.events[0].time]
    first = run.events[0].time
    return (min(known), True) if known else (first, False)


def _told(event: Event) -> str:
    return f"{event.what}: {event.text}" if event.text else event.what


def _event_row(event: Event, began: float) -> tuple[str, str, str, str, str, str]:
    return (
        duration(event.time - began),
        "" if event.step is None else str(event.step),
        event.what,
        "launcher"
        if event.rank is None and event.what != "checkpoint"
        else ""
        if event.rank is None
        else str(event.rank),
        event.text,
        "" if not event.seconds else amount(event.seconds, "seconds"),
    )


def overridden(run: RunRecord) -> dict[str, str]:
    """Keys that were typed, `strategy.shard` -> `strategy.shard=2`; groups and words with plus signs included."""
    words = [word for word in run.command or () if "=" in word and not word.startswith("-")]
    return {word.split("=", 1)[0].lstrip("+~"): word for word in words}


def settings(run: RunRecord) -> Iterator[tuple[str, str, bool]]:
    """Key, value and whether it, or what it lies in, was typed."""
    typed = set(overridden(run))
    for key, value in run.settings.items():
        parents = [key.rsplit(".", n)[0] for n in range(key.count(".") + 1)]
        yield key, value, any(parent in typed for parent in parents)


def command_line(run: RunRecord) -> str | None:
    """What to type to have the run again; None if the command was not kept."""
    return None if run.command is None else " ".join(["trainwright", *map(shlex.quote, run.command)])


def versions(run: RunRecord) -> str:
    """Of the libraries, as the newest checkpoint tells them; "" if there is none."""
    for saved in reversed(run.checkpoints):
        known = saved.about.get("versions")
        if isinstance(known, Mapping) and known:
            return ", ".join(f"{name} {version}" for name, version in sorted(known.items()))
    return ""


def _time(record: Mapping[str, Any]) -> float:
    return number_of(record.get("time")) or 0.0
