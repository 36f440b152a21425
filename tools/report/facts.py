"""Key figures, rates, settings and events of a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from trainwright.core.charts.drawing import Mark, Tick, amount, duration, exact, marks, short, thinned
from trainwright.core.text.printable import shortened
from trainwright.tools.report.files import read_whole
from trainwright.tools.report.plain import number_of, text_of, time_of
from trainwright.tools.report.records import Event, RunRecord


def facts(run: RunRecord) -> list[tuple[str, str]]:
    """Return name and value of the key figures of a run; those that were not measured are left out."""
    found = []
    if run.diverged is not None:
        first, count = run.diverged
        found.append(("diverged", f"loss not finite from step {first} ({count} steps)"))
    if run.last_step is not None:
        most = number_of(run.config.get("max_steps"))
        found.append(("last step logged", f"{run.last_step}" + ("" if most is None else f" of {most:.0f}")))
    for name in ("loss", "val_loss"):
        if run.metrics.get(name):
            found.append((f"last {name}", exact(run.metrics[name][-1][1])))
    for name, values in run.metrics.items():
        if name.endswith("_per_second") and values:
            found.append((name.replace("_", " "), short(values[-1][1])))
    mfu = newest(run, "rate", "mfu")
    if mfu is not None:
        found.append(("MFU", f"{100 * mfu:.3g} %"))
    share = newest(run, "goodput", "share")
    if share is not None:
        found.append(("goodput", f"{100 * share:.3g} %"))
    if run.layout is not None:
        found.append(("ranks", str(run.layout.world_size)))
    # A fault recorded by the launching process was also recorded by surviving ranks.
    reporters = [event.rank for event in run.events if event.what == "fault"]
    faults = reporters.count(None) or len(reporters)
    back = sum(event.what in ("recovered", "rollback") for event in run.events)
    if faults or back:
        found.append(("faults, recoveries", f"{faults}, {back}"))
    found.append(("checkpoints kept", str(len(run.checkpoints))))
    found += [(f"logged to {name}", at) for name, at in run.loggers.items()]
    with suppress(OSError):  # only language models write samples
        found.append(("sample", text_of(read_whole(run.path / "sample.txt", 2**16).decode(errors="replace"))))
    return found


def newest(run: RunRecord, kind: str, name: str) -> float | None:
    """Return the newest value recorded by any rank; None if there is none."""
    found = None
    for _, record in run.records(kind):
        value = number_of(record.get(name))
        if value is not None and (found is None or time_of(record) >= found[0]):
            found = (time_of(record), value)
    return None if found is None else found[1]


def rates(run: RunRecord) -> dict[str, list[tuple[float, float]]]:
    """Return the `rate` records of the first rank that has any: name -> (step, value)."""
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


def settings(run: RunRecord) -> Iterator[tuple[str, str, bool]]:
    """Yield key, value and whether the key or one of its parents was typed."""
    typed = _typed_keys(run)
    for key, value in run.settings.items():
        parents = [key.rsplit(".", n)[0] for n in range(key.count(".") + 1)]
        yield key, value, any(parent in typed for parent in parents)


def command_line(run: RunRecord) -> str | None:
    """Return the command that repeats the run; None if unknown."""
    return None if run.command is None else " ".join(["trainwright", *map(shlex.quote, run.command)])


def versions(run: RunRecord) -> str:
    """Return the library versions recorded in the newest checkpoint; "" if there are none."""
    for saved in reversed(run.checkpoints):
        known = saved.about.get("versions")
        if isinstance(known, Mapping) and known:
            return shortened(", ".join(f"{name} {text_of(version)}" for name, version in sorted(known.items())))
    return ""


def _typed_keys(run: RunRecord) -> set[str]:
    """Return the typed keys and groups, without prefixes `+` and `~`."""
    words = (word for word in run.command or () if "=" in word and not word.startswith("-"))
    return {word.split("=", 1)[0].lstrip("+~") for word in words}


_MOST_EVENTS = 200


@dataclass(frozen=True)
class EventTimeline:
    """Events of a run, as a time line and as a table.

    Args:
        marks: on the time line.
        ticks: of its axis.
        began: description of its zero.
        rows: time, step, kind, rank, text, duration.
        left_out: number of events not shown.
    """

    marks: tuple[Mark, ...]
    ticks: tuple[Tick, ...]
    began: str
    rows: tuple[tuple[str, str, str, str, str, str], ...]
    left_out: int

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of events, in order of first occurrence."""
        return tuple(dict.fromkeys(mark.kind for mark in self.marks))


def timeline(run: RunRecord) -> EventTimeline | None:
    """Return the events of a run; None if there are none."""
    if not run.events:
        return None
    starts = [time_of(records[0]) for records in run.monitor.values() if records]
    known = [time for time in starts if 0 < time <= run.events[0].time]
    began = min(known, default=run.events[0].time)
    shown = [run.events[i] for i in thinned(run.events, _MOST_EVENTS)]
    drawn, ticks = marks([(event.time - began, event.what, _description(event)) for event in shown])
    word = "the first record" if known else "the first event"
    return EventTimeline(
        drawn,
        ticks,
        f"{word}, {datetime.fromtimestamp(began, UTC).strftime('%Y-%m-%d %H:%M:%S')} UTC",
        tuple(_event_row(event, began) for event in shown),
        len(run.events) - len(shown),
    )


def _description(event: Event) -> str:
    return f"{event.what}: {event.text}" if event.text else event.what


def _event_row(event: Event, began: float) -> tuple[str, str, str, str, str, str]:
    launcher = "" if event.what == "checkpoint" else "launcher"
    return (
        duration(event.time - began),
        "" if event.step is None else str(event.step),
        event.what,
        launcher if event.rank is None else str(event.rank),
        event.text,
        "" if not event.seconds else amount(event.seconds, "seconds"),
    )
