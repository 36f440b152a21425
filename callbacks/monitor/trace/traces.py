"""Traces of torch's profiler, of all ranks in one file, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Events of a trace that belong together by a number which is unique within one rank only.
_WITH_ID = ("s", "t", "f", "b", "n", "e", "N", "O", "D")


def merged(traces: Mapping[int, Mapping[str, Any]], offsets: Mapping[int, int]) -> dict[str, Any]:
    """One trace of those of several ranks, by the clock of rank 0.

    Args:
        traces: by rank, as ``export_chrome_trace`` of torch's profiler writes them.
        offsets: by rank, nanoseconds to add to its clock.

    Returns:
        A trace in which times are microseconds since the first event, and processes are named after their ranks.
    """
    begins = {rank: _begin(trace) + offsets.get(rank, 0) / 1000 for rank, trace in traces.items()}
    starts = [begins[rank] + each["ts"] for rank, trace in traces.items() for each in _timed(trace)]
    first = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    numbers: dict[tuple[int, Any], int] = {}
    for rank, trace in sorted(traces.items()):
        for event in trace["traceEvents"]:
            moved = dict(event)
            if "ts" in event and event.get("ph") != "M":
                moved["ts"] = begins[rank] + event["ts"] - first
            moved["pid"] = numbers.setdefault((rank, event.get("pid")), len(numbers) + 1)
            if event.get("ph") in _WITH_ID and "id" in event:
                moved["id"] = f"{rank}/{event['id']}"
            if event.get("ph") == "M" and event.get("name") == "process_name":
                name = event.get("args", {}).get("name", "")
                moved["args"] = {"name": f"rank {rank}: {name}"}
            if event.get("ph") == "M" and event.get("name") == "process_sort_index":
                moved["args"] = {"sort_index": numbers[rank, event.get("pid")]}
            events.append(moved)
    return {"displayTimeUnit": "ms", "ranks": sorted(traces), "traceEvents": events}


def _timed(trace: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [each for each in trace["traceEvents"] if "ts" in each and each.get("ph") != "M"]


def _begin(trace: Mapping[str, Any]) -> float:
    """Microseconds of the unix clock from which times of the trace count."""
    return float(trace.get("baseTimeNanoseconds", 0)) / 1000


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Write a trace, compressed, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with gzip.open(partial, "wt", encoding="utf-8", compresslevel=4) as file:
        json.dump(trace, file, separators=(",", ":"))
    os.replace(partial, path)


def read_trace(path: Path) -> dict[str, Any]:
    """A trace that :func:`write_trace` wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found
