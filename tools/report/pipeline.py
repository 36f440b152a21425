"""Timeline of the ranks of a pipeline in a sampled step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainwright.core.charts.drawing import COLOURS, Bar, BarPart, BarTable, amount
from trainwright.tools.report.plain import number_of, text_of, whole_of
from trainwright.tools.report.records import RunRecord

_Entry = tuple[float, float, str, str, str]
# Stands for no micro-batch, or no single stage.
_NONE = "-1"
_MOST_RANKS = 64
_MOST_ENTRIES = 2000
# Bar segments of all ranks.
_MOST_DRAWN = 20_000


@dataclass(frozen=True)
class Pipeline:
    """Sampled step of a pipeline.

    Args:
        table: one row per rank, with its stages.
        entries: (stage, action, micro-batch, from, to), seconds since the start of the step.
        left_out: number of entries not listed.
        step: that was sampled; None if unknown.
    """

    table: BarTable
    entries: tuple[tuple[str, str, str, str, str], ...]
    left_out: int
    step: int | None


def pipeline(run: RunRecord) -> Pipeline | None:
    """Return the newest sampled step; None if there is none."""
    sampled = _sampled(run)
    if not sampled:
        return None
    step, by_rank, undrawn = sampled
    # One row per rank, not per stage: a rank works at one stage at a time and would seem idle in the others.
    rows = {_label_of(rank, entries): sorted(entries) for rank, entries in by_rank.items()}
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
        "One optimizer step of the pipeline: timeline by rank", ("stage", "timeline", "busy", "idle", "bubble"),
        legend, tuple(bars)
    )  # fmt: skip
    return Pipeline(table, tuple(listed[:_MOST_ENTRIES]), max(len(listed) - _MOST_ENTRIES, 0) + undrawn, step)


def _label_of(rank: int, entries: Sequence[_Entry]) -> str:
    stages = sorted({stage for *_, stage in entries if stage != _NONE}, key=_numbers)
    if len(stages) > 1:
        return f"stages {', '.join(stages)}, rank {rank}"
    return _stage_of(rank, stages[0] if stages else _NONE)


def _stage_of(rank: int, stage: str) -> str:
    return f"rank {rank}" if stage == _NONE else f"stage {stage}, rank {rank}"


def _sampled(run: RunRecord) -> tuple[int | None, dict[int, list[_Entry]], int] | None:
    """Return the newest step with the most timelines of ranks, and the number of entries too many to draw."""
    by_step: dict[int | None, dict[int, list[_Entry]]] = {}
    for rank, record in run.records("bubble"):
        raw, began = record.get("timeline"), number_of(record.get("began")) or 0.0
        items = raw[:_MOST_DRAWN] if isinstance(raw, list) else []
        entries = [entry for item in items if (entry := _entry(item, began))]
        if entries:
            by_step.setdefault(whole_of(record.get("step")), {})[rank] = entries
    if not by_step:
        return None
    step = max(by_step, key=lambda step: (len(by_step[step]), -1 if step is None else step))
    ranks = sorted(by_step[step])[:_MOST_RANKS]
    most = _MOST_DRAWN // len(ranks)
    undrawn = sum(max(len(by_step[step][rank]) - most, 0) for rank in ranks)
    return step, {rank: by_step[step][rank][:most] for rank in ranks}, undrawn


def _entry(item: object, began: float) -> _Entry | None:
    if not isinstance(item, (list, tuple)) or len(item) < 5:
        return None
    start, end = number_of(item[0]), number_of(item[1])
    if start is None or end is None or end < start:
        return None
    return began + start, began + end, text_of(item[2])[:40], text_of(item[3])[:20], text_of(item[4])[:20]


def _rank_bar(label: str, entries: Sequence[_Entry], begin: float, span: float, colours: Mapping[str, int]) -> Bar:
    parts, busy, at = [], 0.0, begin
    for start, end, what, micro_batch, stage in entries:
        if start > at:
            parts.append(_idle(at, start, begin, span))
        which = "" if micro_batch == _NONE else f", micro-batch {micro_batch} of stage {stage}"
        text = f"{what}{which}: {amount(end - start, 'seconds')}"
        parts.append(BarPart(what, colours[what], _percent(start - begin, span), _percent(end - start, span), text))
        busy += max(end - max(start, at), 0.0)
        at = max(at, end)
    if at < begin + span:
        parts.append(_idle(at, begin + span, begin, span))
    idle = span - busy
    return Bar(
        label, tuple(parts), (amount(busy, "seconds"), amount(idle, "seconds"), f"{100 * idle / span:.3g} %")
    )  # fmt: skip


def _idle(start: float, end: float, begin: float, span: float) -> BarPart:
    text = f"bubble: {amount(end - start, 'seconds')} idle"
    return BarPart("bubble", "bubble", _percent(start - begin, span), _percent(end - start, span), text)


def _percent(value: float, whole: float) -> float:
    return round(100 * value / whole, 3)


def _colour_of(what: str, number: int) -> int:
    return {"forward": 0, "backward": 1}.get(what, 2 + number % (COLOURS - 2))


def _numbers(label: str) -> list[tuple[bool, int, str]]:
    words = label.replace(",", "").split()
    return [(not word.isdecimal(), int(word) if word.isdecimal() else 0, word) for word in words]
