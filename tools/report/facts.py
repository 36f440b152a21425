"""The first numbers of a page, and rates step by step."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.tools.report.charts import (
    exact,
    short,
)
from trainwright.tools.report.plain import number_of, time_of
from trainwright.tools.report.records import RunRecord


@dataclass(frozen=True)
class Fact:
    """A number at the top of the page, and what it is of."""

    name: str
    value: str


def facts(run: RunRecord) -> list[Fact]:
    """The first numbers that a person looks for; what was not measured is left out."""
    found = []
    if run.diverged is not None:
        first, count = run.diverged
        found.append(Fact("diverged", f"loss not finite from step {first} ({count} steps)"))
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
        if value is not None and (found is None or time_of(record) >= found[0]):
            found = (time_of(record), value)
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
