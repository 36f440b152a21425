"""What happened in a run, on an axis of time and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from trainwright.core.charts.drawing import Mark, Tick, amount, duration, marks, thinned
from trainwright.tools.report.plain import time_of
from trainwright.tools.report.records import Event, RunRecord

_MOST_EVENTS = 200


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
    times = [time_of(records[0]) for records in run.monitor.values() if records]
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
