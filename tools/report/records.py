"""Content of a run directory as plain values, with notes on what is missing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainwright.core.config.masking import masked, masked_words
from trainwright.core.layout import Layout
from trainwright.core.text.printable import shortened
from trainwright.tools.report.files import MetricsFile, MonitorFiles, read_end, read_json, read_whole
from trainwright.tools.report.plain import GREATEST, moment_of, number_of, steps_of, text_of, whole_of

_MOST_KEYS = 2000
_MOST_CHECKPOINTS = 500
# Bytes of config.yaml, command.json, plan.json, and of all checkpoint manifests.
_MAX_CONFIG, _MAX_COMMAND, _MAX_PLAN, _MAX_MANIFESTS = 2**18, 2**20, 2**23, 2**25
_MAX_RESTARTS = 2**20
# Longest number and deepest nesting in config.yaml: the parser's time is the product of length and depth.
_LONGEST_NUMBER, _DEEPEST = 40, 50
# Files named by a note.
_SHOWN = 4
# Largest size of an axis.
_MOST_RANKS = 2**24
_RESTART_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?) (.*)")
_RECOVERED = re.compile(r"(^|; )(go(es|ing) on|the others (go on|continue)|resuming)|takes the place|recovered|joined")
_AXES = ("pipeline", "replicate", "shard", "context", "tensor", "expert")


@dataclass(frozen=True)
class Event:
    """Something that happened in a run.

    Args:
        time: seconds since 1970.
        what: fault, recovered, restarted, rollback, checkpoint, validation, preempted, profile, or another word.
        text: description.
        step: optimizer steps done; None if unknown.
        rank: that recorded it; None: the launching process.
        seconds: duration; None if unknown.
    """

    time: float
    what: str
    text: str
    step: int | None = None
    rank: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class SavedRecord:
    """A checkpoint.

    Args:
        name: of its folder.
        step: optimizer steps done; None if unknown.
        created: UTC time in ISO 8601; "" if unknown.
        bytes: of all its files; None if unknown.
        about: other fields of its manifest.
    """

    name: str
    step: int | None
    created: str
    bytes: int | None
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """Content of a run directory.

    Args:
        path: the run directory.
        label: short name, unique on the page.
        config: config.yaml; {} if it cannot be read.
        settings: its leaves in order, `strategy.shard` -> `2`; secrets are masked.
        command: the words after `trainwright`, secrets masked; None if unknown.
        metrics: column -> (step, value).
        diverged: step of the first `loss` that is not finite, and the number of such values; None if all are finite.
        monitor: rank -> records; of repeated steps only the newest.
        events: in order of time.
        checkpoints: in order of steps.
        plan: plan.json; None if there is none.
        loggers: name of a logger -> the run it writes to.
        layout: None if unknown.
        notes: sentences on what is missing or could not be read.
    """

    path: Path
    label: str
    config: Mapping[str, Any]
    settings: Mapping[str, str]
    command: tuple[str, ...] | None
    metrics: Mapping[str, list[tuple[int, float]]]
    diverged: tuple[int, int] | None
    monitor: Mapping[int, list[dict[str, Any]]]
    events: tuple[Event, ...]
    checkpoints: tuple[SavedRecord, ...]
    plan: Mapping[str, Any] | None
    loggers: Mapping[str, str]
    layout: Layout | None
    notes: tuple[str, ...]

    def records(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each record of a kind with its rank, rank by rank."""
        for rank, records in sorted(self.monitor.items()):
            for record in records:
                if record["kind"] == kind:
                    yield rank, record

    @property
    def last_step(self) -> int | None:
        """Greatest logged step; None before the first."""
        steps = [values[-1][0] for values in self.metrics.values() if values]
        noted = [step for _, record in self.records("step") if (step := whole_of(record.get("step"))) is not None]
        return max([*steps, *noted], default=None)


class _PlainLoader(yaml.SafeLoader):
    """YAML loader without aliases, which can make a small file huge."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases and deep nesting; read long numbers as text."""
        self._depth += 1
        if self._depth > _DEEPEST or self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias, or nested too deeply")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode) and len(node.value) > _LONGEST_NUMBER:
            node.tag = self.DEFAULT_SCALAR_TAG
        return node


def is_run(path: Path) -> bool:
    """Return whether a folder has files of a run."""
    return any((path / name).exists() for name in ("config.yaml", "metrics.csv", "monitor"))


def read_run(path: Path, label: str) -> RunRecord:
    """Read a run directory; missing and damaged files are named in `notes`."""
    notes: list[str] = []
    config = read_config(path, notes)
    metrics = MetricsFile(path / "metrics.csv")
    metrics.update()
    notes += _notes_of_metrics(metrics)
    monitor = MonitorFiles(path / "monitor")
    monitor.update()
    notes += _notes_of_monitor(monitor)
    checkpoints = read_checkpoints(path, notes)
    return RunRecord(
        path=path,
        label=label,
        config=config,
        settings=dict(islice(_leaves(masked(config)), _MOST_KEYS)),
        command=_read_command(path, notes),
        metrics=metrics.columns,
        diverged=metrics.not_finite.get("loss"),
        monitor={rank: without_repeated_steps(records) for rank, records in monitor.by_rank.items()},
        events=tuple(read_events(path, monitor.by_rank, checkpoints, notes)),
        checkpoints=tuple(checkpoints),
        plan=_document(path / "plan.json", notes, _MAX_PLAN),
        loggers=dict(_loggers(path, notes)),
        layout=layout_of(config, checkpoints),
        notes=tuple(notes),
    )


def read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return config.yaml as plain values. Nothing is interpolated, so no data of this machine gets into a page."""
    unknown = "so configuration and layout are unknown."
    try:
        text = read_whole(path / "config.yaml", _MAX_CONFIG).decode("utf-8")
        loaded = yaml.load(text, Loader=_PlainLoader)  # noqa: S506
    except FileNotFoundError:
        notes.append(f"There is no config.yaml, {unknown}")
        return {}
    except Exception as error:  # the parser raises many types
        why = f" ({error.strerror})" if isinstance(error, OSError) else ""
        notes.append(f"config.yaml cannot be read{why}, {unknown}")
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _read_command(path: Path, notes: list[str]) -> tuple[str, ...] | None:
    """Return the words after `trainwright` that started the run, secrets masked; None if unknown."""
    words = (_document(path / "command.json", notes, _MAX_COMMAND) or {}).get("words")
    return tuple(masked_words(map(text_of, words[:_MOST_KEYS]))) if isinstance(words, list) and words else None


def _document(path: Path, notes: list[str], most_bytes: int) -> dict[str, Any] | None:
    """Return the mapping in a JSON file; None if it does not exist, and with a note if it cannot be read."""
    try:
        document = read_json(path, most_bytes)
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror}).")
        return None
    except ValueError:
        notes.append(f"{path.name} is damaged and was left out.")
        return None
    return document if isinstance(document, dict) else None


def _loggers(path: Path, notes: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the name of each external logger and the run it writes to, secrets masked."""
    document = _document(path / "loggers.json", notes, _MAX_COMMAND) or {}
    for name, about in islice(document.items(), _SHOWN):
        if isinstance(about, dict) and (at := text_of(about.get("at"))):
            yield shortened(name), shortened(str(masked(at)))


def read_checkpoints(path: Path, notes: list[str]) -> list[SavedRecord]:
    """Return the checkpoints of the run directory by step, without those still being written."""
    found, problems, allowed = [], list[str](), _MAX_MANIFESTS
    for manifest in islice(sorted((path / "checkpoints").glob("*/manifest.json")), _MOST_CHECKPOINTS):
        document = _document(manifest, problems, allowed)
        allowed -= _size_of(manifest) if document is not None else 0
        found.append(_saved(manifest.parent.name, (document or {}).get("about")))
    if problems:
        notes.append(f"Only the names of {len(problems)} checkpoints are known: {problems[0]}")
    return sorted(found, key=lambda saved: (saved.step is None, saved.step or 0, saved.name))


def _saved(name: str, about: object) -> SavedRecord:
    about = about if isinstance(about, dict) else {}
    created = text_of(about.get("created"))
    return SavedRecord(name, whole_of(about.get("step")), created, whole_of(about.get("bytes")), about)


def _size_of(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:  # deleted meanwhile
        return 0


def read_events(
    path: Path, monitor: Mapping[int, list[dict[str, Any]]], checkpoints: list[SavedRecord], notes: list[str]
) -> list[Event]:
    """Return the events of the monitors and of logs/restarts.log, and existing checkpoints, in order of time.

    An event recorded by several ranks (a checkpoint, a validation) is returned once; one without a valid time is left
    out, with a note.
    """
    events: dict[tuple[str, object], Event] = {}
    undated = 0
    for rank, records in sorted(monitor.items()):
        for record in records:
            if record["kind"] != "event":
                continue
            event = _event_of(rank, record)
            if event is None:
                undated += 1
            else:
                key = event.step if event.step is not None else event.time
                events.setdefault((f"{event.what} {event.text}", key), event)
    found = [*events.values(), *_restarts(path / "logs" / "restarts.log", notes)]
    names = {saved.step: f"{saved.name} was saved" for saved in checkpoints}
    found = [
        replace(event, text=event.text or names.get(event.step, "")) if event.what == "checkpoint" else event
        for event in found
    ]
    noted = {event.step for event in found if event.what == "checkpoint"}
    for saved in checkpoints:
        time = moment_of(saved.created)
        if time is not None and saved.step not in noted:
            found.append(Event(time, "checkpoint", f"{saved.name} was saved", saved.step))
    if undated:
        notes.append(f"{undated} events in monitor/ have no time between 1970 and 2242 and were left out.")
    return sorted(found, key=lambda event: event.time)


def _event_of(rank: int, record: Mapping[str, Any]) -> Event | None:
    time = moment_of(record.get("time"))
    if time is None:
        return None
    what, text = text_of(record.get("what"), "event"), text_of(record.get("text"))
    return Event(time, what, text, whole_of(record.get("step")), rank, number_of(record.get("seconds")))


def without_repeated_steps(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of a rank with each step once: after a rollback the newer ones count.

    A window that extends beyond the step rolled back to is shortened. Events and goodput stay: they follow the clock.
    """
    found: list[dict[str, Any] | None] = []
    of_kind: dict[str, list[int]] = {}  # indices of valid records, by step
    for record in records:
        step = number_of(record.get("step"))
        if step is not None and record["kind"] not in _CLOCK_KINDS:
            indices = of_kind.setdefault(record["kind"], [])
            window = max(steps_of(record), 1.0) if record["kind"] == "step" else 1.0
            _cut(found, indices, step - window)
            indices.append(len(found))
        found.append(record)
    return [record for record in found if record is not None]


_CLOCK_KINDS = ("event", "goodput")


def _cut(found: list[dict[str, Any] | None], indices: list[int], done: float) -> None:
    """Drop what the records at ``indices`` say about steps after the first ``done`` ones."""
    while indices:
        record = found[indices[-1]]
        assert record is not None
        step = number_of(record["step"]) or 0.0
        if step <= done:
            return
        kept = _truncated(record, done) if record["kind"] == "step" else None
        found[indices[-1]] = kept
        if kept is not None:
            return
        indices.pop()


def _truncated(record: Mapping[str, Any], done: float) -> dict[str, Any] | None:
    """Return a window shortened to the steps up to ``done``; None if nothing remains."""
    steps, seconds = steps_of(record), record.get("seconds")
    remaining = steps - ((number_of(record["step"]) or 0.0) - done)
    if remaining <= 0 or not isinstance(seconds, Mapping):
        return None
    kept = {part: value * remaining / steps for part, each in seconds.items() if (value := number_of(each)) is not None}
    return {**record, "step": done, "steps": remaining, "seconds": kept, "total": sum(kept.values())}


def layout_of(config: Mapping[str, Any], checkpoints: list[SavedRecord]) -> Layout | None:
    """Return the layout of the newest checkpoint, else of the configuration; None if unknown."""
    sizes = [saved.about["layout"] for saved in checkpoints if isinstance(saved.about.get("layout"), dict)]
    if sizes:
        saved = _layout({axis: sizes[-1].get(axis, 1) for axis in _AXES})
        return None if saved is None or saved.is_open else saved
    strategy = config.get("strategy")
    devices, nodes = config.get("devices"), config.get("nodes", 1)
    if not isinstance(strategy, dict) or not isinstance(devices, int) or not isinstance(nodes, int):
        return None
    known = {axis: strategy[axis] for axis in _AXES if axis in strategy}
    world = devices * nodes
    if not 0 < world <= _MOST_RANKS:
        return None
    if not known:  # strategies without axes that replicate: single, ddp
        is_copy = str(strategy.get("_target_", "")).startswith(
            ("trainwright.strategies.data.ddp.", "trainwright.strategies.data.single.")
        )
        return Layout(replicate=world) if is_copy else None
    layout = _layout(known)
    try:
        return None if layout is None else layout.resolve(world)
    except ValueError:
        return None


def _layout(sizes: Mapping[str, Any]) -> Layout | None:
    if any(isinstance(size, int) and size > _MOST_RANKS for size in sizes.values()):
        return None
    try:
        return Layout(**sizes)
    except (TypeError, ValueError):
        return None


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from _leaves(below, f"{path}.{key}" if path else str(key))
    else:
        yield path, _setting(value)


def _setting(value: object) -> str:
    return "null" if value is None else shortened(str(value)) if isinstance(value, (list, dict)) else text_of(value)


def _restarts(path: Path, notes: list[str]) -> Iterator[Event]:
    try:
        text, before = read_end(path, _MAX_RESTARTS)
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror}).")
        return
    if before:
        notes.append(f"{path.name} is long: its first {before} bytes were not read.")
    undated = 0
    for line in text.decode("utf-8", errors="replace").splitlines():
        match = _RESTART_LINE.fullmatch(line)
        if match is None:
            continue
        time = moment_of(match[1])
        if time is None:
            undated += 1
            continue
        step = re.search(r"\bstep[ =](\d+)", match[2])
        yield Event(time, _what_of(match[2]), shortened(match[2]), None if step is None else whole_of(step[1]))
    if undated:
        notes.append(f"{undated} lines of {path.name} have no valid date and were left out.")


def _what_of(line: str) -> str:
    """Return the kind of a line of restarts.log."""
    if re.match(r"restart \d", line):
        return "restarted"
    if line.startswith("given up"):
        return "fault"
    return "recovered" if _RECOVERED.search(line) else "fault"


def _notes_of_metrics(metrics: MetricsFile) -> Iterator[str]:
    if metrics.tail.problem is not None:
        yield f"metrics.csv cannot be read ({metrics.tail.problem}), so no curves can be drawn."
    elif not metrics.tail.path.exists():
        yield "There is no metrics.csv, so no curves can be drawn."
    if metrics.skipped:
        yield f"{metrics.skipped} rows or cells of metrics.csv are damaged and were left out."
    if metrics.left_out:
        yield f"metrics.csv is large: {metrics.left_out} columns or rows were not read."
    if metrics.tail.left_out:
        yield f"metrics.csv is long: {metrics.tail.left_out} bytes after its header were not read."
    for name, (_, count) in metrics.not_finite.items():
        yield (f"{count} values of {shortened(name)} are NaN, infinite or beyond {GREATEST:g}; curves leave them out.")


def _notes_of_monitor(monitor: MonitorFiles) -> Iterator[str]:
    if not monitor.by_rank:
        yield (
            "There is no monitor/rank_<n>.jsonl, so time by part, memory by rank, MFU and the pipeline timeline were "
            "not measured."
        )
    if monitor.skipped:
        yield f"{monitor.skipped} lines of monitor/ are damaged and were left out."
    if monitor.problems:
        yield f"{len(monitor.problems)} files of monitor/ cannot be read: {', '.join(monitor.problems[:_SHOWN])}."
    if monitor.records_left_out:
        yield f"The files of monitor/ are long: {monitor.records_left_out} lines were not read."
    if monitor.left_out:
        yield f"The files of monitor/ are long: {monitor.left_out} bytes were not read."
    if monitor.ranks_left_out:
        yield f"The monitors of {monitor.ranks_left_out} ranks were not read."
