"""Traces of torch's profiler on demand."""

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
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from trainwright.callbacks.monitor.records import FOLDER, tell
from trainwright.callbacks.monitor.sample import is_sampled, sampled_ranks
from trainwright.callbacks.monitor.trace.clocks import clock_offset
from trainwright.callbacks.steps import StepCounter, window_steps
from trainwright.checkpoint.exchange.groups import default_store
from trainwright.core.run.peers import peers_of
from trainwright.core.run.traits import traits_of

# Events of a trace that belong together by a number which is unique within one rank only.
_WITH_ID = ("s", "t", "f", "b", "n", "e", "N", "O", "D")
ASK = "profile"
"""Name of the file in the folder of records by which a running job is asked for a trace."""
_STEPS = 5
# How long rank 0 waits for the traces of others, and how often it looks.
_PATIENCE_SECONDS, _PAUSE_SECONDS = 60.0, 0.02


def profile_problem(steps: Any) -> str | None:
    """What is wrong with ``steps`` of :class:`Profile`; ``None``: nothing."""
    if isinstance(steps, Sequence) and not isinstance(steps, str) and len(steps) == 2:
        whole = all(isinstance(each, int) and not isinstance(each, bool) for each in steps)
        if whole and 0 <= steps[0] < steps[1]:
            return None
    return (
        f"{steps} (allowed: two whole numbers, the first optimizer step of the trace and the one after its last, like "
        "[10,20], or null)"
    )


class Profile(Callback):
    """Take a trace of torch's profiler of some optimizer steps, on all ranks, and put them together in one file.

    Of more than ``most_ranks`` ranks, some that stand for all take one: a trace of a rank is some MiB a step, rank 0
    reads them all, and asks its clock for each of them.

    It is written to ``<run_dir>/monitor/trace_<step>.json.gz``, which https://ui.perfetto.dev and chrome://tracing
    open. Clocks of different machines are aligned: how far they are apart is measured over the process group's store
    when the trace begins. Each rank first writes what it has to ``trace_<step>_rank_<n>.json.gz``; those that rank 0
    does not see, since machines have folders of their own, stay apart.

    A running job is asked for a trace by a file ``<run_dir>/monitor/profile``, made with any tool, which may hold the
    number of steps (5 if it is empty). Rank 0 looks for it at the end of each window, removes it, and tells the others
    over the store; the trace begins two windows later.

    Args:
        steps: the first step of a trace, counted from 0, and the one after its last; ``None``: only when asked.
        run_dir: of the run; ``None``: off.
        most_ranks: that take a trace, see :func:`~trainwright.callbacks.monitor.sample.is_sampled`; ``None``: all.

    Raises:
        ValueError: if ``steps`` are impossible, or given without ``run_dir``; if ``most_ranks`` is less than 1.
    """

    looks_at_parameters = False

    def __init__(
        self, steps: Sequence[int] | None = None, run_dir: str | None = None, most_ranks: int | None = 64
    ) -> None:
        problem = None if steps is None else profile_problem(steps)
        if problem is not None:
            raise ValueError(f"Profile: steps={problem}")
        self.steps = None if steps is None else (int(steps[0]), int(steps[1]))
        if most_ranks is not None and most_ranks < 1:
            raise ValueError(f"Profile(most_ranks={most_ranks}) (allowed: 1 or more, or None for all ranks)")
        self.run_dir = run_dir
        self.most_ranks = most_ranks
        self.latest: Path | None = None
        """The trace of this rank that was written last."""
        self._counter = StepCounter()
        self._window = 0
        self._asked = 0  # traces asked for while the job ran
        self._wanted: list[tuple[int, int]] = []
        self._profiler: Any = None
        self._span = (0, 0)
        self._offset = 0
        self._began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count steps."""
        self._counter.start(trainer)
        done = self._counter.next_number(trainer)
        self._window, self._wanted = 0, []
        if self.run_dir is None or not is_sampled(trainer.global_rank, trainer.world_size, self.most_ranks):
            return
        self._window = window_steps(None, trainer) or 50
        if self.steps is not None and self.steps[0] >= done:
            self._wanted = [self.steps]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a trace that is wanted from this step on."""
        if not self._wanted or self._profiler is not None or self._counter.next_number(trainer) < self._wanted[0][0]:
            return
        first, end = self._wanted.pop(0)
        begin = self._counter.next_number(trainer)
        self._span, self._began = (begin, begin + end - first), time.perf_counter()
        together = traits_of(trainer.strategy).steps_are_collective
        if together and _store(trainer) is not None:
            key = f"trainwright/clock/{begin}"
            others = sampled_ranks(trainer.world_size, self.most_ranks)[1:]
            self._offset, _ = clock_offset(_store(trainer), key, trainer.global_rank, others)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if trainer.strategy.root_device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """End a trace with its last step; at the end of a window, see whether one is asked for."""
        step = self._counter.ended(trainer) if self._window else None
        if step is None:
            return
        if self._profiler is not None and step + 1 >= self._span[1]:
            self._finish(trainer)
        if (step + 1) % self._window == 0:
            self._look(trainer, step + 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training ends within a trace."""
        if self._profiler is not None:
            self._finish(trainer)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count steps from there."""
        self._counter.start(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The trace is lost."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    # ---- on demand ------------------------------------------------------------------------------------------------

    def _look(self, trainer: Trainer, done: int) -> None:
        store, key = _store(trainer), f"trainwright/profile/{self._asked}"
        if trainer.is_global_zero:
            count = self._taken()
            if count is None:
                return
            span = (done + 2 * self._window, done + 2 * self._window + count)
            rank_zero_info(f"Profile: a trace of steps {span[0]} to {span[1] - 1} was asked for.")
            if store is not None:
                store.set(key, json.dumps(span))
        elif store is not None and store.check([key]):
            first, end = json.loads(store.get(key))
            span = (int(first), int(end))
        else:
            return
        self._asked += 1
        self._wanted = sorted([*self._wanted, span])

    def _taken(self) -> int | None:
        """The number of steps that the file asks for, which is removed; ``None``: there is none."""
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
        self.latest = self._write(_of_rank(stem, trainer.global_rank))
        ranks = sampled_ranks(trainer.world_size, self.most_ranks)
        together = traits_of(trainer.strategy).steps_are_collective
        if together and _store(trainer) is not None:
            _wait_for_all(_store(trainer), f"trainwright/trace/{self._span[0]}", len(ranks), trainer.is_global_zero)
        if trainer.is_global_zero:
            self.latest = _merge(stem, ranks)
        seconds = time.perf_counter() - self._began
        steps = f"steps {self._span[0]} to {self._span[1] - 1}"
        tell(trainer, "event", {"what": "profile", "text": f"{steps}: {self.latest.name}", "seconds": seconds})

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
    """Let rank 0 wait until all have written; what is late is missed."""
    written, end = store.add(key, 1), time.monotonic() + _PATIENCE_SECONDS
    while is_first and written < ranks and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
        written = store.add(key, 0)


def _merge(stem: Path, ranks: Sequence[int]) -> Path:
    there = {rank: _of_rank(stem, rank) for rank in ranks if _of_rank(stem, rank).is_file()}
    missing = len(ranks) - len(there)
    if missing:
        rank_zero_warn(f"Profile: the traces of {missing} rank(s) are not here, and so not in {stem.name}.json.gz.")
    traces = {rank: read_trace(path) for rank, path in there.items()}
    whole = stem.with_name(f"{stem.name}.json.gz")
    write_trace(whole, merged(traces, {rank: int(trace["offset"]) for rank, trace in traces.items()}))
    for path in there.values():
        path.unlink()
    return whole


def _of_rank(stem: Path, rank: int) -> Path:
    return stem.with_name(f"{stem.name}_rank_{rank}.json.gz")


def _store(trainer: Any) -> Any:
    """Where ranks leave word for each other; ``None``: there is one rank."""
    own = peers_of(trainer.strategy).fit_store
    if own is not None:
        return own
    if trainer.world_size == 1 or not dist.is_initialized():
        return None
    return default_store()


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
