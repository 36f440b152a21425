"""Profiler traces on demand."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from trainwright.callbacks.monitor.records import FOLDER, emit
from trainwright.callbacks.monitor.sample import is_sampled, sampled_ranks
from trainwright.callbacks.monitor.trace.clocks import clock_offset
from trainwright.callbacks.monitor.trace.profile_option import profile_problem
from trainwright.callbacks.steps import are_synchronous, step_number
from trainwright.callbacks.windows import Windowed
from trainwright.checkpoint.exchange.groups import default_store
from trainwright.core.config.options import number, require
from trainwright.core.run.peers import peers_of

# Event types with an id that is unique only within a rank.
_WITH_ID = ("s", "t", "f", "b", "n", "e", "N", "O", "D")
ASK = "profile"
"""File in the folder of records that requests a trace of a running job."""
_STEPS = 5
# Rank 0's timeout and poll interval for the traces of others.
_PATIENCE_SECONDS, _PAUSE_SECONDS = 60.0, 0.02


class Profile(Windowed):
    """Trace some optimizer steps with torch's profiler on all ranks, merged into one file.

    Of more than ``most_ranks`` ranks a sample is traced: a trace has some MiB per rank and step, and rank 0 merges them
    all.

    The file is ``<run_dir>/monitor/trace_<step>.json.gz``, for https://ui.perfetto.dev or chrome://tracing. Clocks of
    different machines are aligned over the process group's store when the trace starts. Each rank first writes
    ``trace_<step>_rank_<n>.json.gz``; those that rank 0 cannot see, on machines with their own folders, are not merged.

    A trace of a running job is requested by creating ``<run_dir>/monitor/profile``, which may hold the number of steps
    (default 5). Rank 0 polls it at the end of each window, removes it, and notifies the others over the store; the
    trace starts two windows later.

    Args:
        steps: the first step of a trace, counted from 0, and the one after its last; ``None``: only on request.
        run_dir: of the run; ``None``: off.
        most_ranks: maximum number of ranks traced, see :func:`~trainwright.callbacks.monitor.sample.is_sampled`;
            ``None``: all.

    Attributes:
        latest: the last trace written by this rank.

    Raises:
        ValueError: if ``steps`` are invalid, or ``most_ranks`` is less than 1.
    """

    looks_at_parameters = False

    def __init__(
        self, steps: Sequence[int] | None = None, run_dir: str | None = None, most_ranks: int | None = 64
    ) -> None:
        problem = None if steps is None else profile_problem(steps, "None = only when a running job is asked")
        if problem is not None:
            raise ValueError(f"Profile: steps={problem}")
        self.steps = None if steps is None else (int(steps[0]), int(steps[1]))
        super().__init__()
        require(self, int | None, number(None, least=1, null="for all ranks"), most_ranks=most_ranks)
        self.run_dir = run_dir
        self.most_ranks = most_ranks
        self.latest: Path | None = None
        self._asked = 0  # requests so far
        self._wanted: list[tuple[int, int]] = []
        self._profiler: Any = None
        self._span = (0, 0)
        self._offset = 0
        self._began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting steps."""
        super().on_train_start(trainer, pl_module)
        self._wanted = []
        if self.run_dir is None or not is_sampled(trainer.global_rank, trainer.world_size, self.most_ranks):
            self._window = 0
            return
        self._window = self._window or 50
        if self.steps is not None and self.steps[0] >= step_number(trainer):
            self._wanted = [self.steps]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start a trace that is due."""
        begin = step_number(trainer)
        if not self._wanted or self._profiler is not None or begin < self._wanted[0][0]:
            return
        first, end = self._wanted.pop(0)
        self._span, self._began = (begin, begin + end - first), time.perf_counter()
        if are_synchronous(trainer) and _store(trainer) is not None:
            key = f"trainwright/clock/{begin}"
            others = sampled_ranks(trainer.world_size, self.most_ranks)[1:]
            self._offset, _ = clock_offset(_store(trainer), key, trainer.global_rank, others)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if trainer.strategy.root_device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def _end_step(self, trainer: Trainer, step: int) -> None:
        """End a trace with its last step; at the end of a window, check for a request."""
        if self._profiler is not None and step + 1 >= self._span[1]:
            self._finish(trainer)
        super()._end_step(trainer, step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finish a running trace."""
        if self._profiler is not None:
            self._finish(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Drop the trace."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    # ---- on demand ------------------------------------------------------------------------------------------------

    def _report(self, trainer: Trainer, step: int) -> None:
        """Poll."""
        done = step + 1
        store, key = _store(trainer), f"trainwright/profile/{self._asked}"
        if trainer.is_global_zero:
            count = self._take_request()
            if count is None:
                return
            span = (done + 2 * self._window, done + 2 * self._window + count)
            rank_zero_info(f"Profile: a trace of steps {span[0]} to {span[1] - 1} was requested.")
            if store is not None:
                store.set(key, json.dumps(span))
        elif store is not None and store.check([key]):
            first, end = json.loads(store.get(key))
            span = (int(first), int(end))
        else:
            return
        self._asked += 1
        self._wanted = sorted([*self._wanted, span])

    def _take_request(self) -> int | None:
        """Return the number of steps in the request file, and remove it; ``None`` if there is none."""
        assert self.run_dir is not None
        path = Path(self.run_dir) / FOLDER / ASK
        try:
            text = path.read_text().strip()
            path.unlink()
        except OSError:
            return None
        return max(int(text), 1) if text.isdecimal() else _STEPS

    # ---- the trace ------------------------------------------------------------------------------------------------

    def _finish(self, trainer: Trainer) -> None:
        assert self.run_dir is not None
        stem = Path(self.run_dir) / FOLDER / f"trace_{self._span[0]}"
        self.latest = self._write(_rank_path(stem, trainer.global_rank))
        ranks = sampled_ranks(trainer.world_size, self.most_ranks)
        if are_synchronous(trainer) and _store(trainer) is not None:
            _wait_for_all(_store(trainer), f"trainwright/trace/{self._span[0]}", len(ranks), trainer.is_global_zero)
        if trainer.is_global_zero:
            self.latest = _merge(stem, ranks)
        seconds = time.perf_counter() - self._began
        steps = f"steps {self._span[0]} to {self._span[1] - 1}"
        emit(trainer, "event", {"what": "profile", "text": f"{steps}: {self.latest.name}", "seconds": seconds})

    def _write(self, path: Path) -> Path:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            exported = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(exported))
            trace = json.loads(exported.read_text(encoding="utf-8"))
        write_trace(path, {**trace, "offset": self._offset})
        return path


def _wait_for_all(store: Any, key: str, ranks: int, is_first: bool) -> None:
    """Let rank 0 wait until all have written, up to a timeout."""
    written, end = store.add(key, 1), time.monotonic() + _PATIENCE_SECONDS
    while is_first and written < ranks and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
        written = store.add(key, 0)


def _merge(stem: Path, ranks: Sequence[int]) -> Path:
    there = {rank: _rank_path(stem, rank) for rank in ranks if _rank_path(stem, rank).is_file()}
    missing = len(ranks) - len(there)
    if missing:
        rank_zero_warn(f"Profile: {stem.name}.json.gz lacks the traces of {missing} rank(s), not visible here.")
    traces = {rank: read_trace(path) for rank, path in there.items()}
    whole = stem.with_name(f"{stem.name}.json.gz")
    write_trace(whole, merge_traces(traces, {rank: int(trace["offset"]) for rank, trace in traces.items()}))
    for path in there.values():
        path.unlink()
    return whole


def _rank_path(stem: Path, rank: int) -> Path:
    return stem.with_name(f"{stem.name}_rank_{rank}.json.gz")


def _store(trainer: Any) -> Any:
    """Return the store that ranks share; ``None`` for a single rank."""
    own = peers_of(trainer.strategy).fit_store
    if own is not None:
        return own
    if trainer.world_size == 1 or not dist.is_initialized():
        return None
    return default_store()


def merge_traces(traces: Mapping[int, Mapping[str, Any]], offsets: Mapping[int, int]) -> dict[str, Any]:
    """Merge the traces of several ranks, by the clock of rank 0.

    Args:
        traces: by rank, from ``export_chrome_trace``.
        offsets: by rank, nanoseconds to add to its clock.

    Returns:
        A trace with times in microseconds since the first event, and processes named after their ranks.
    """
    # The unix time that times of a trace are relative to.
    begins = {rank: (t.get("baseTimeNanoseconds", 0) + offsets.get(rank, 0)) / 1000 for rank, t in traces.items()}
    timed = [(rank, each) for rank, trace in traces.items() for each in trace["traceEvents"] if _is_timed(each)]
    first = min((begins[rank] + each["ts"] for rank, each in timed), default=0.0)
    events: list[dict[str, Any]] = []
    numbers: dict[tuple[int, Any], int] = {}
    for rank, trace in sorted(traces.items()):
        for event in trace["traceEvents"]:
            moved, kind = dict(event), event.get("ph")
            if _is_timed(event):
                moved["ts"] = begins[rank] + event["ts"] - first
            moved["pid"] = numbers.setdefault((rank, event.get("pid")), len(numbers) + 1)
            if kind in _WITH_ID and "id" in event:
                moved["id"] = f"{rank}/{event['id']}"
            if kind == "M" and event.get("name") == "process_name":
                moved["args"] = {"name": f"rank {rank}: {event.get('args', {}).get('name', '')}"}
            if kind == "M" and event.get("name") == "process_sort_index":
                moved["args"] = {"sort_index": moved["pid"]}
            events.append(moved)
    return {"displayTimeUnit": "ms", "ranks": sorted(traces), "traceEvents": events}


def _is_timed(event: Mapping[str, Any]) -> bool:
    return "ts" in event and event.get("ph") != "M"


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Write a compressed trace atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with gzip.open(partial, "wt", encoding="utf-8", compresslevel=4) as file:
        json.dump(trace, file, separators=(",", ":"))
    os.replace(partial, path)


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace written by :func:`write_trace`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found
