"""Terminal view of `trainwright watch`, redrawn when the files of a run grow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trainwright.core.charts.drawing import amount, duration, short
from trainwright.core.text.printable import one_line, shortened
from trainwright.tools.report.charts import KINDS, per_step
from trainwright.tools.report.files import MetricsFile, MonitorFiles
from trainwright.tools.report.plain import number_of
from trainwright.tools.report.records import Event, read_checkpoints, read_config, read_events

_MOST_RANKS = 16
_MOST_EVENTS = 6
_MOST_PARTS = 2
_MOST_NAMES = 8
_BARS = "▁▂▃▄▅▆▇█"
# A rank is behind if its last record is this many times older than the median.
_BEHIND = 3.0


class WatchedRun:
    """Files of a run that may be running.

    Args:
        run_dir: of the run; it need not exist yet.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._metrics = MetricsFile(run_dir / "metrics.csv")
        self._monitor = MonitorFiles(run_dir / "monitor")
        self._config: dict[str, Any] = {}
        self._config_written: float | None = None

    def update(self) -> None:
        """Read what was added to the files."""
        written = _written(self.run_dir / "config.yaml")
        if written != self._config_written:
            self._config, self._config_written = read_config(self.run_dir, []), written
        self._metrics.update()
        self._monitor.update()

    def picture(self, now: float | None = None) -> RenderableType:
        """Return the view for a terminal.

        Args:
            now: seconds since 1970; None: the current time.
        """
        now = time.time() if now is None else now
        if not self._metrics.columns and not self._monitor.by_rank:
            started = self._config_written is not None
            said = "nothing was logged yet" if started else "the run has not started: there is no config.yaml yet"
            if self._metrics.tail.problem is not None:
                said += f"; metrics.csv cannot be read: {self._metrics.tail.problem}"
            return _text(f"{self.run_dir}: {said}")
        parts: list[RenderableType] = [self._head(now)]
        for part in (self._curve(), self._ranks(now), self._events()):
            if part is not None:
                parts += [Text(), part]
        return Group(*parts)

    @property
    def _step(self) -> int:
        """Optimizer steps done."""
        logged = [values[-1][0] + 1 for values in self._metrics.columns.values() if values]
        noted = [number_of(record.get("step")) for each in self._monitor.by_rank.values() for record in each[-1:]]
        return int(max([*logged, *(step for step in noted if step is not None)], default=0))

    def _head(self, now: float) -> Table:
        most = number_of(self._config.get("max_steps"))
        step_seconds = self._last("step_seconds")
        rows = [("run", str(self.run_dir)), ("step", f"{self._step}" + (f" of {most:.0f}" if most is not None else ""))]
        rows += [(name, f"{value:.6g}") for name in ("loss", "val_loss") if (value := self._last(name)) is not None]
        speeds = [
            f"{short(values[-1][1])} {name.removesuffix('_per_second')}/s"
            for name, values in sorted(self._metrics.columns.items())
            if name.endswith("_per_second") and values
        ]
        if speeds:
            rows.append(("speed", ", ".join(speeds[:_MOST_NAMES])))
        for kind, name in (("rate", "mfu"), ("goodput", "share")):
            value = self._newest(kind, name)
            if value is not None:
                rows.append(("MFU" if name == "mfu" else kind, f"{100 * value:.3g} %"))
        if most is not None and self._step >= most:
            rows.append(("time left", "none: all steps are done"))
        elif most is not None and step_seconds:
            rows.append(("time left", duration((most - self._step) * step_seconds)))
        written = _written(self.run_dir / "metrics.csv")
        if written is not None:
            rows.append(("last written", f"{duration(max(now - written, 0.0))} ago"))
        if "loss" in self._metrics.not_finite:
            first, count = self._metrics.not_finite["loss"]
            rows.append(("diverged", f"loss not finite from step {first} ({count} steps)"))
        if self._metrics.not_finite:
            names = ", ".join(sorted(self._metrics.not_finite)[:_MOST_NAMES])
            rows.append(("not finite", f"NaN or infinite values of {names}"))
        problems = [*([f"metrics.csv: {problem}"] if (problem := self._metrics.tail.problem) else [])]
        problems += self._monitor.problems[:_MOST_NAMES]
        if problems:
            rows.append(("not read", ", ".join(problems)))
        table = Table.grid(padding=(0, 2))
        for name, said in rows:
            table.add_row(_text(name, "bold"), _text(said))
        return table

    def _curve(self) -> Text | None:
        values = [value for _, value in self._metrics.columns.get("loss", [])]
        return Text.assemble(("loss  ", "bold"), sparkline(values, 60)) if len(values) > 1 else None

    def _ranks(self, now: float) -> RenderableType | None:
        ranks = sorted(self._monitor.by_rank)
        if not ranks:
            return Text("no monitor/rank_<n>.jsonl: memory and time by rank were not measured", style="dim")
        steps = {rank: self._newest_of(rank, "step") for rank in ranks}
        memory = {rank: self._newest_of(rank, "memory") for rank in ranks}
        behind = stragglers({rank: record for rank, record in steps.items() if record}, now)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("rank", "step", "held", "process", "whole step", "spent on", ""):
            table.add_column(
                name, justify="left" if name in ("spent on", "") else "right", no_wrap=name == "whole step"
            )
        for rank in ranks[:_MOST_RANKS]:
            cells = (Text(cell) for cell in _rank_cells(rank, steps[rank], memory[rank]))
            table.add_row(*cells, Text(behind.get(rank, ""), style="red"))
        left_out = len(ranks) - _MOST_RANKS
        hidden = [f"rank {rank}: {text}" for rank, text in behind.items() if rank in ranks[_MOST_RANKS:]]
        rest = [Text(f"... and {left_out} more ranks", style="dim")] if left_out > 0 else []
        return Group(table, *rest, *(Text(line, style="red") for line in hidden[:_MOST_RANKS]))

    def _events(self) -> RenderableType | None:
        events = read_events(self.run_dir, self._monitor.by_rank, read_checkpoints(self.run_dir, []), [])
        if not events:
            return None
        table = Table.grid(padding=(0, 2))
        for event in events[-_MOST_EVENTS:]:
            clock = time.strftime("%H:%M:%S", time.localtime(event.time))
            table.add_row(_text(clock, "dim"), _text(event.what, _style(event)), _text(_description(event)))
        return table

    def _last(self, name: str) -> float | None:
        values = self._metrics.columns.get(name)
        return values[-1][1] if values else None

    def _newest(self, kind: str, name: str) -> float | None:
        found = [self._newest_of(rank, kind) for rank in sorted(self._monitor.by_rank)]
        values = [value for record in found if record and (value := number_of(record.get(name))) is not None]
        return values[0] if values else None

    def _newest_of(self, rank: int, kind: str) -> dict[str, Any] | None:
        return next((record for record in reversed(self._monitor.by_rank[rank]) if record["kind"] == kind), None)


def watch(run_dir: Path, every: float, *, once: bool = False, console: Console | None = None) -> None:
    """Show a run until Ctrl-C.

    Args:
        run_dir: of the run; waits until it exists.
        every: seconds between updates.
        once: show the current state and return.
        console: to write to; None: standard output.
    """
    watched, console = WatchedRun(run_dir), console or Console()
    try:
        watched.update()
        if once or not console.is_terminal:
            _show(watched, console)
        if once:
            return
        if console.is_terminal:
            _live(watched, every, console)
        while True:  # a file or a pipe gets one view after the other
            time.sleep(every)
            watched.update()
            _show(watched, console)
    except KeyboardInterrupt:
        return


def _show(watched: WatchedRun, console: Console) -> None:
    console.print(watched.picture())
    console.file.flush()  # files and pipes are buffered


def _live(watched: WatchedRun, every: float, console: Console) -> None:
    with Live(watched.picture(), console=console, auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(every)
            watched.update()
            live.update(watched.picture(), refresh=True)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as block characters, each the mean of its interval."""
    pieces = min(width, len(values))
    means = []
    for i in range(pieces):
        piece = values[len(values) * i // pieces : len(values) * (i + 1) // pieces]
        means.append(sum(piece) / len(piece))
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def stragglers(steps: Mapping[int, Mapping[str, Any]], now: float) -> dict[int, str]:
    """Return ranks with fewer steps than the median, or silent for much longer, with a description.

    Args:
        steps: rank -> its newest record `step`.
        now: seconds since 1970.
    """
    if len(steps) < 2:
        return {}
    done = {rank: number_of(record.get("step")) or 0.0 for rank, record in steps.items()}
    silent = {rank: max(now - (number_of(record.get("time")) or now), 0.0) for rank, record in steps.items()}
    middle, patience = median(done.values()), _BEHIND * median(silent.values()) + 1.0
    found = {}
    for rank in steps:
        if done[rank] < middle:
            found[rank] = f"{middle - done[rank]:.0f} steps behind"
        elif silent[rank] > patience:
            found[rank] = f"silent for {duration(silent[rank])}"
    return found


def _rank_cells(rank: int, step: Mapping[str, Any] | None, memory: Mapping[str, Any] | None) -> list[str]:
    seconds = per_step(step or {})
    done = number_of((step or {}).get("step"))
    held = [value for kind in KINDS if (value := number_of((memory or {}).get(kind))) is not None]
    process = number_of((memory or {}).get("peak", (memory or {}).get("host")))
    return [
        str(rank),
        "" if done is None else f"{done:.0f}",
        amount(sum(held), "bytes") if held else "",
        "" if process is None else amount(process, "bytes"),
        amount(sum(seconds.values()), "seconds") if seconds else "",
        _spent(seconds),
    ]


def _spent(seconds: Mapping[str, float]) -> str:
    """Return the largest parts in percent of the total."""
    total = sum(seconds.values())
    largest = sorted(seconds, key=lambda part: -seconds[part])[:_MOST_PARTS]
    shares = [(part, round(100 * seconds[part] / total)) for part in largest] if total > 0 else []
    return ", ".join(f"{part} {share} %" for part, share in shares if share)


def _text(said: str, style: str = "") -> Text:
    """Return sanitized text; everything read from files passes here before it reaches the terminal."""
    return Text(shortened(one_line(said)), style=style)


def _written(path: Path) -> float | None:
    """Return the modification time of a file in seconds since 1970; None if it does not exist."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return None


def _description(event: Event) -> str:
    step = "" if event.step is None else f"step {event.step}"
    return ", ".join(part for part in (step, event.text) if part)


def _style(event: Event) -> str:
    return {"fault": "red", "diverged": "red", "preempted": "yellow"}.get(event.what, "green")
