"""Traces of all ranks, aligned to one clock."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from tests.callbacks.faulty import fit
from trainwright.callbacks.monitor.trace.clocks import clock_offset
from trainwright.callbacks.monitor.trace.profile import Profile, merge_traces, read_trace


def test_clock_offset() -> None:
    store, apart, found = dist.HashStore(), 3_000_000_000, {}

    def rank(number: int, machine: str) -> None:
        ahead = apart if machine != "a" else 0
        found[number] = clock_offset(store, "x", number, [1, 2], lambda: time.time_ns() + ahead, machine)

    threads = [threading.Thread(target=rank, args=(each, "aab"[each])) for each in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert (found[0], found[1]) == ((0, 0), (0, 0))
    offset, wrong_by = found[2]
    assert abs(offset + apart) <= wrong_by < 500_000_000  # far less than the offset, also on a busy machine


def test_merge_traces() -> None:
    def trace(base: int) -> dict[str, Any]:
        named = {"ph": "M", "name": "process_name", "pid": 7, "ts": 0, "args": {"name": "python"}}
        flow = {"ph": "s", "id": 1, "name": "flow", "pid": 7, "tid": 1, "ts": 5.0}
        work = {"ph": "X", "name": "mm", "pid": 7, "tid": 1, "ts": 5.0, "dur": 2.0}
        return {"baseTimeNanoseconds": base, "traceEvents": [named, flow, work]}

    whole = merge_traces({0: trace(1_000_000), 1: trace(9_000_000)}, {0: 0, 1: -7_990_000})
    work = [each for each in whole["traceEvents"] if each["name"] == "mm"]
    assert [each["ts"] for each in work] == [0.0, 10.0]  # 8 ms apart, 7.99 ms of which is the clock offset
    names = [each["args"]["name"] for each in whole["traceEvents"] if each["name"] == "process_name"]
    assert names == ["rank 0: python", "rank 1: python"]
    assert len({each["pid"] for each in work}) == 2
    assert len({each["id"] for each in whole["traceEvents"] if each["name"] == "flow"}) == 2


class Quick:
    """Fake of torch's profiler, which takes seconds to start: one event from start to stop."""

    def __init__(self, **_: Any) -> None:
        self.began = self.ended = 0

    def start(self) -> None:
        self.began = time.time_ns()

    def stop(self) -> None:
        self.ended = time.time_ns()

    def export_chrome_trace(self, path: str) -> None:
        work = {"ph": "X", "name": "mm", "pid": 7, "tid": 1, "ts": 0.0, "dur": (self.ended - self.began) / 1000}
        Path(path).write_text(json.dumps({"baseTimeNanoseconds": self.began, "traceEvents": [work]}))


def of_ranks(folder: str) -> list[str]:
    asked = Path(folder) / "monitor" / "profile"
    if dist.get_rank() == 0:
        asked.parent.mkdir()
        asked.write_text("2")
    dist.barrier()
    with mock.patch.object(torch.profiler, "profile", Quick):
        fit("ddp", {}, Profile([1, 3], folder), steps=9, log_every_n_steps=1)
    return [] if dist.get_rank() else sorted(path.name for path in asked.parent.iterdir())


def test_configured_and_requested_trace(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    files, _ = ranks(of_ranks, 2, str(tmp_path))
    # Requested at the first step; it starts two windows after the configured one.
    assert files == ["trace_1.json.gz", "trace_3.json.gz"]
    for name in files:
        whole = read_trace(tmp_path / "monitor" / name)
        assert whole["ranks"] == [0, 1]
        first, second = ((each["ts"], each["ts"] + each["dur"]) for each in whole["traceEvents"])
        # The ranks run in step, so their events overlap.
        assert max(first[0], second[0]) < min(first[1], second[1])
        assert len({each["pid"] for each in whole["traceEvents"]}) == 2


def test_torch_profiler_trace_and_event(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []

    class Hears(Callback):
        def on_record(self, trainer: Any, record: Any) -> None:
            records.append(dict(record))

    fit("single", {}, Profile([1, 2], str(tmp_path)), Hears(), steps=3)
    whole = read_trace(tmp_path / "monitor" / "trace_1.json.gz")
    assert any("mm" in each.get("name", "") and each.get("ph") == "X" for each in whole["traceEvents"])
    [event] = records
    assert (event["what"], event["text"], event["step"]) == ("profile", "steps 1 to 1: trace_1.json.gz", 2)
    assert event["seconds"] > 0
