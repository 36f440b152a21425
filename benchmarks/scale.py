"""Cost per rank as the world grows: CPU seconds, bytes and messages at 10, 1,000 and 100,000 ranks.

One process acts as one rank of a simulated world. Its process group is torch's fake backend, which completes
collectives at once: the work and traffic of this rank are real, its waiting times are not. Rank 0 gets simulated
messages of the others. Connections of gloo are counted between threads, of as many ranks as fit.

Run: python -m benchmarks.scale [--ranks 10 1000 100000]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import xxhash
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainwright.callbacks.guard.replica_check import _ReplicaMap
from trainwright.callbacks.monitor.sample import sampled_ranks
from trainwright.callbacks.monitor.trace.clocks import clock_offset
from trainwright.callbacks.traffic.stragglers import StepTimes, find_stragglers
from trainwright.checkpoint.exchange import distinct
from trainwright.checkpoint.exchange import groups as gloo_groups
from trainwright.checkpoint.exchange.distinct import all_gather_values, problems_of_ranks
from trainwright.checkpoint.format.boxes import to_json
from trainwright.checkpoint.format.manifest import MANIFEST, read_manifest, records_of
from trainwright.checkpoint.format.records import SPLIT, TENSORS, FileRecord, Listed, Manifest, file_of, list_to_bytes
from trainwright.checkpoint.format.tensor_index import from_json, tensor_index
from trainwright.checkpoint.store.storage import Folder
from trainwright.checkpoint.write.assignment import (
    Assignment,
    Box,
    ReplicaGroup,
    choose_writers,
    share_out,
    writers_of_common,
)
from trainwright.checkpoint.write.box_index import directory_of, led_box_file, stored_by
from trainwright.checkpoint.write.save import Content, write
from trainwright.checkpoint.write.split import MetadataSplit, divide_metadata
from trainwright.command.schema.compose import compose
from trainwright.core.layout import Layout
from trainwright.core.run.launcher import Launcher
from trainwright.core.text.messages import RUN_TOKEN, seal
from trainwright.core.text.sizes import size_text
from trainwright.launch.engines.torchrun import agreement
from trainwright.planning.search.search import plan
from trainwright.strategies.contract.communication.calls import CollectiveCall, listen
from trainwright.strategies.contract.communication.costs import least_bytes
from trainwright.strategies.contract.groups import LayoutGroups
from trainwright.strategies.contract.same_model import refuse_different_models
from trainwright.tools.report.files import MonitorFiles

RANKS = (10, 1_000, 100_000)
# Tensors of the model whose states are saved: parameters, and two of the optimizer for each.
_PARAMETERS, _ROWS = 48, 4096
_RANKS_OF_A_MACHINE = 8
# Threads that connect to each other by gloo.
_GLOO_RANKS = (4, 8, 16)
_SECRET = "of no run"


@dataclass(frozen=True)
class Cost:
    """Cost of one operation on one rank.

    Args:
        seconds: of the CPU in this process, so that it does not matter what else the machine does.
        bytes: that it sends, or that the file has; ``None``: none.
        messages: collectives, or requests to a store; ``None``: none.
        files: that the run has of it; ``None``: none.
    """

    seconds: float
    bytes: float | None = None
    messages: int | None = None
    files: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.seconds:.4f} s"]
        if self.bytes is not None:
            parts.append(size_text(self.bytes, digits=2))
        if self.messages is not None:
            parts.append(f"{self.messages:,} msg")
        if self.files is not None:
            parts.append(f"{self.files:,} files")
        return ", ".join(parts)


@dataclass(frozen=True)
class Item:
    """One thing that is measured.

    Args:
        name: of it.
        when: how often it happens.
        measure: for a layout.
    """

    name: str
    when: str
    measure: Callable[[Layout], Cost]


def layout_of(ranks: int) -> Layout:
    """Hybrid sharding as it would be: a state on some ranks, and copies of it on the rest."""
    shard = next(size for size in (32, 8, 2, 1) if ranks % size == 0 and size * size <= ranks)
    return Layout(replicate=ranks // shard, shard=shard)


@contextmanager
def world(ranks: int, rank: int = 0) -> Iterator[None]:
    """This process as a rank among others that are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def sent() -> Iterator[list[CollectiveCall]]:
    """The collectives that are called meanwhile."""
    calls: list[CollectiveCall] = []
    end = listen(calls.append)
    try:
        yield calls
    finally:
        end()


def _cost(begin: float, calls: Sequence[CollectiveCall]) -> Cost:
    taken = time.process_time() - begin
    total = sum(least_bytes(call.kind, call.size, call.group.size(), 1) for call in calls if call.kind != "barrier")
    return Cost(taken, total, len(calls))


# ---- start-up -------------------------------------------------------------------------------------------------------


def groups_of_layout(layout: Layout) -> Cost:
    """The mesh of a layout and its process groups."""
    with world(layout.world_size), sent() as calls:
        begin = time.process_time()
        LayoutGroups(layout, "cpu").mesh(("replicate",), ("shard",))
        return _cost(begin, calls)


def _planned_run(ranks: int, size: str) -> list[str]:
    """A run that a person would plan, as typed; its batch can be divided among 10, 1,000 and 100,000 ranks."""
    return ["recipe=llama_3d", f"size={size}", "device=h100", "global_batch_size=100000", f"devices={ranks}"]


def planned(layout: Layout, size: str = "70b") -> Cost:
    """`trainwright plan`: composing the configuration, and weighing all layouts of so many H100."""
    begin = time.process_time()
    plan(compose(None, [*_planned_run(layout.world_size, size), "precision=bf16-mixed"]))
    return Cost(time.process_time() - begin)


def started(rank: int) -> Callable[[Layout], Cost]:
    """Return a measure of a rank's store requests for the configuration, under torchrun on machines of 8 ranks.

    Finding the store of rank 0 takes two requests more of each.
    """

    def measure(layout: Layout) -> Cost:
        machines = -(-layout.world_size // _RANKS_OF_A_MACHINE)
        store = CountingStore()
        cfg = compose(None, _planned_run(10, "70b"))
        for machine in range(machines):
            store.store.set(f"{agreement._AGENT}/{machine}", "0123456789abcdef")
        if rank != 0:
            store.store.set(agreement._KEY, seal(_SECRET, OmegaConf.to_yaml(cfg, resolve=True)))
        given = {
            "TORCHELASTIC_RUN_ID": "x",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": str(machines),
            "LOCAL_RANK": "1",
        }
        given[RUN_TOKEN] = _SECRET
        launcher = Launcher("torchrun", rank, layout.world_size, _RANKS_OF_A_MACHINE)
        with (
            mock.patch.dict(os.environ, given),
            mock.patch("trainwright.launch.ranks.torchrun_store.meet", return_value=store),
        ):
            begin = time.process_time()
            agreement.agree(launcher, lambda _: cfg)
            return Cost(time.process_time() - begin, None, store.messages)

    return measure


def same_model(layout: Layout) -> Cost:
    """Measure the check that all ranks have one model."""
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(_PARAMETERS // 2)))
    with world(layout.world_size), sent() as calls:
        begin = time.process_time()
        refuse_different_models(module, torch.device("cpu"))
        return _cost(begin, calls)


class CountingStore(dist.Store):  # type: ignore[misc]
    """Counts what a rank asks of a store, which is in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.store = dist.HashStore()
        self.messages = 0

    def set(self, key: str, value: str) -> None:
        """Count and pass on."""
        self.messages += 1
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        """Count and pass on."""
        self.messages += 1
        found: bytes = self.store.get(key)
        return found

    def add(self, key: str, amount: int) -> int:
        """Count and pass on."""
        self.messages += 1
        total: int = self.store.add(key, amount)
        return total

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        """Count and pass on."""
        self.messages += 1
        self.store.wait(keys, timeout)


def clocks(layout: Layout) -> Cost:
    """Measure the broadcast of rank 0's clock to the ranks that record a trace."""
    store, ranks = CountingStore(), sampled_ranks(layout.world_size, 64)
    for rank in ranks[1:]:
        store.store.set(f"x/machine/{rank}", "elsewhere")
        for turn in range(8):
            store.store.set(f"x/{rank}/ask/{turn}", "?")
    begin = time.process_time()
    clock_offset(store, "x", 0, ranks[1:])
    return Cost(time.process_time() - begin, None, store.messages)


# ---- while training -------------------------------------------------------------------------------------------------


def stragglers(layout: Layout) -> Cost:
    """The ranks that are slower than their peers, of four numbers from each."""
    draw = random.Random(1)
    times = [StepTimes(1.0 + draw.random() / 100, 0.01, 0.01, 0.1) for _ in range(layout.world_size)]
    begin = time.process_time()
    find_stragglers(times, layout, 0.1)
    return Cost(time.process_time() - begin, 16.0 * (layout.world_size - 1), 1)


def replicas(layout: Layout) -> Cost:
    """Measure the comparison of replicas once the shards are known."""
    digests = {(box.key, box.offsets, box.sizes): bytes(16) for box in _boxes(layout, 0)}
    holders = _ReplicaMap()
    holders.sets = [tuple(ranks) for ranks in layout.groups("replicate")]
    holders._boxes = sorted(digests)
    holders._members = {holders.sets[0]: holders._boxes}
    with world(layout.world_size), sent() as calls:
        begin = time.process_time()
        holders.differences(digests, torch.device("cpu"))
        return _cost(begin, calls)


def problems(layout: Layout) -> Cost:
    """Measure the exchange of problems while no rank has one."""
    with world(layout.world_size), sent() as calls:
        begin = time.process_time()
        problems_of_ranks(None, dist.group.WORLD)
        return _cost(begin, calls)


def said(layout: Layout) -> Cost:
    """Measure the exchange of messages while all ranks agree."""
    with world(layout.world_size), sent() as calls:
        begin = time.process_time()
        all_gather_values({"loss": 1.0}, dist.group.WORLD)
        return _cost(begin, calls)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def _boxes(layout: Layout, shard: int) -> list[Box]:
    """Return the boxes of the ranks of a shard: rows of parameters and two states, and replicated tensors."""
    first, last = (_ROWS * place // layout.shard for place in (shard, shard + 1))
    kinds = [f"{kind}/blocks.{number}.weight" for number in range(_PARAMETERS) for kind in ("w", "o/exp_avg", "o/sq")]
    boxes = [
        Box(kind, (first, 0), (last - first, 512), (last - first) * 2048, (_ROWS, 512))
        for kind in (kinds if first < last else [])
    ]
    scalars = [Box(f"o/step.{number}", (), (), 4, ()) for number in range(_PARAMETERS)]
    own = [
        Box(f"rank/*/{name}", (0,), (size,), size, (size,), "uint8") for name, size in (("torch", 5056), ("np", 2500))
    ]
    return [*boxes, *scalars, *own]


def _groups(layout: Layout) -> list[ReplicaGroup]:
    if layout.replicate == 1:
        return [ReplicaGroup([rank], _boxes(layout, rank)) for rank in range(layout.world_size)]
    lines = layout.groups("replicate")
    return [ReplicaGroup(ranks, _boxes(layout, number)) for number, ranks in enumerate(lines)]


def assignment(layout: Layout) -> Cost:
    """Measure how rank 0 assigns boxes to writers from the distinct reports, and the bytes that it receives."""
    groups = _groups(layout)
    begin = time.process_time()
    winners = choose_writers(groups)
    share_out(groups[0].boxes, len(groups[0].ranks), 0, winners)
    taken = time.process_time() - begin
    size = sum(60 * len(replicas.boxes) for replicas in groups) + 24 * layout.world_size
    return Cost(taken, size, len(groups))


@dataclass(frozen=True)
class Reports:
    """Simulated reports of the files and boxes of a state."""

    groups: list[ReplicaGroup]
    winners: dict[Box, int]
    split: MetadataSplit | None

    @classmethod
    def of(cls, layout: Layout) -> Reports:
        """As the ranks of a layout agree on it."""
        groups = _groups(layout)
        of_rank = [0] * layout.world_size
        for number, replicas in enumerate(groups):
            for rank in replicas.ranks:
                of_rank[rank] = number
        lengths = [len(json.dumps(replicas.boxes, separators=(",", ":"))) for replicas in groups]
        said = distinct.EqualRanks(of_rank, [replicas.ranks[0] for replicas in groups], lengths)
        return cls(groups, choose_writers(groups), divide_metadata(said))

    def assignment(self, file: int = 0) -> Assignment:
        """That of a rank that writes a file of boxes down; of the first one, that of the first rank."""
        if self.split is None:
            return Assignment(frozenset(), self.groups, self.winners)
        first = file * self.split.groups
        led = dict(list(enumerate(self.groups))[first : first + self.split.groups])
        common = writers_of_common(self.winners, [replicas.ranks for replicas in self.groups])
        return Assignment(frozenset(), self.groups, self.winners, self.split, led, common)


def _record(name: str, data: bytes = b"") -> FileRecord:
    return FileRecord(name, len(data) or 10**6, xxhash.xxh3_128_hexdigest(data), 0)


def one_file(reports: Reports) -> Cost:
    """One `tensors.json` and one `manifest.json` for all: made, written down and read again, by one rank."""
    begin = time.process_time()
    stored = stored_by(Assignment(frozenset(), reports.groups, reports.winners))
    text = to_json(stored)
    names = {box.file for tensor in stored.values() for box in tensor.boxes}
    manifest = Manifest({name: _record(name) for name in names}).to_bytes()
    from_json(text, Manifest.from_bytes(manifest).files, "checkpoint")
    return Cost(time.process_time() - begin, len(text) + len(manifest), None, 2)


def first_files(reports: Reports) -> dict[str, bytes]:
    """Return the metadata that rank 0 composes of one assignment."""
    assignment = reports.assignment()
    if reports.split is None:
        return {TENSORS: to_json(stored_by(assignment))}
    return {TENSORS: directory_of(assignment).to_bytes(), reports.split.boxes[0][0]: led_box_file(assignment)}


def each_files(reports: Reports, composed: dict[str, bytes]) -> dict[str, bytes]:
    """Return the file lists and the manifest that rank 0 writes at each save."""
    known = {name: _record(name, data) for name, data in composed.items()}
    if reports.split is None:
        ranks = sum(len(replicas.ranks) for replicas in reports.groups)
        return {MANIFEST: Manifest({**known, **{n: _record(n) for n in map(file_of, range(ranks))}}).to_bytes()}
    split = reports.split
    name = split.lists[0][0]
    data = list_to_bytes([_record(file_of(rank)) for rank in split.list_of(0)])
    others = {other: _record(other) for other, _ in [*split.lists, *split.boxes]}
    lists = {other: Listed(len(split.list_of(first)), 10**9) for other, first in split.lists}
    files = {**others, **known, name: _record(name, data)}
    return {name: data, MANIFEST: Manifest(files, {}, SPLIT, lists).to_bytes()}


def made(reports: Reports) -> Cost:
    """Measure the metadata that rank 0 composes at its first save and sends at every save."""
    begin = time.process_time()
    composed = first_files(reports)
    files = {**composed, **each_files(reports, composed)}
    return Cost(time.process_time() - begin, sum(map(len, files.values())), None, len(files))


def made_again(reports: Reports) -> Cost:
    """Measure the metadata that rank 0 sends at every later save, without unchanged files."""
    composed = first_files(reports)
    begin = time.process_time()
    again = first_files(reports) if reports.split is None else composed
    files = {**again, **each_files(reports, again)}
    return Cost(time.process_time() - begin, sum(map(len, files.values())), None, len(files))


def opened(reports: Reports) -> Cost:
    """Measure the metadata that a rank reads to find its own boxes and the files it verifies."""
    replicas, rank = reports.groups[-1], reports.groups[-1].ranks[0]
    composed = first_files(reports)
    if reports.split is not None:
        file = reports.split.boxes_of(len(reports.groups) - 1)
        composed[reports.split.boxes[file][0]] = led_box_file(reports.assignment(file))
    with tempfile.TemporaryDirectory() as name, counted_reads() as reads:
        for file_name, data in {**composed, **each_files(reports, composed)}.items():
            Path(name, file_name).write_bytes(data)
        begin = time.process_time()
        manifest = read_manifest(name)
        for number, each in enumerate(manifest.lists):
            if number == 0:  # that of its part
                records_of(name, manifest, each)
        tensors = tensor_index(Folder(name, manifest), manifest)
        for box in replicas.boxes:
            key = box.key.replace("rank/*/", f"rank/{rank}/")
            tensors.boxes(key, [(box.offsets, box.sizes)])
        return Cost(time.process_time() - begin, sum(reads), None, len(reads))


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Bytes of each file of a folder that is read meanwhile."""
    reads: list[int] = []
    usual = Folder.read

    def read(folder: Folder, name: str) -> bytes:
        data = usual(folder, name)
        reads.append(len(data))
        return data

    Folder.read = read  # type: ignore[method-assign]
    try:
        yield reads
    finally:
        Folder.read = usual  # type: ignore[method-assign]


def metadata(measure: Callable[[Reports], Cost], one_copy: bool = False) -> Callable[[Layout], Cost]:
    """A measure of what is said of files and boxes, for a layout.

    Args:
        measure: of what is said.
        one_copy: for a state that all ranks hold together, but at most 1,000 of them.
    """
    return lambda layout: measure(Reports.of(Layout(shard=min(1_000, layout.world_size)) if one_copy else layout))


def save(layout: Layout) -> Cost:
    """Measure a repeated save on rank 0 without its tensors: bytes sent and seconds."""
    reports = Reports.of(layout)
    assignment = replace(reports.assignment(), groups=[], winners={}, composed=first_files(reports))
    with tempfile.TemporaryDirectory() as folder, world(layout.world_size), sent() as calls:
        begin = time.process_time()
        write(Content({}, {}, {}, assignment), f"{folder}/checkpoint", dist.group.WORLD)
        return _cost(begin, calls)


# ---- files ----------------------------------------------------------------------------------------------------------


def monitors(layout: Layout) -> Cost:
    """Reading the records of ten windows that a report is made of."""
    ranks = sampled_ranks(layout.world_size, 1024)
    line = '{"time":1.0,"step":50,"kind":"step","seconds":{"forward":0.1,"backward":0.2},"total":0.3,"steps":50}\n'
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank in ranks:
            (folder / f"rank_{rank}.jsonl").write_text(line * 10)
        begin = time.process_time()
        MonitorFiles(folder).update()
        return Cost(time.process_time() - begin, len(line) * 10 * len(ranks), None, len(ranks))


PLAN = Item("trainwright plan, llama_3d of 70b", "by hand", planned)

ITEMS = (
    Item("start under torchrun, rank 0", "once", started(0)),
    Item("start under torchrun, another rank", "once", started(1)),
    Item("process groups and mesh", "once", groups_of_layout),
    Item("one model on all ranks", "once", same_model),
    Item("clocks, on rank 0", "a trace", clocks),
    Item("stragglers", "100 steps", stragglers),
    Item("replica check, hashing apart", "1000 steps", replicas),
    Item("is anything wrong", "a save", problems),
    Item("what all ranks say", "a save", said),
    Item("assigning boxes, on rank 0", "first save", assignment),
    Item("save, beside tensors", "a save", save),
    Item("metadata, one file for all", "a save", metadata(one_file)),
    Item("metadata, first save, rank 0", "first save", metadata(made)),
    Item("metadata, later saves, rank 0", "a save", metadata(made_again)),
    Item("metadata, read by a rank", "once", metadata(opened)),
    Item("one copy on all: one file", "a save", metadata(one_file, one_copy=True)),
    Item("one copy on all: first save, rank 0", "first save", metadata(made, one_copy=True)),
    Item("one copy on all: later saves, rank 0", "a save", metadata(made_again, one_copy=True)),
    Item("one copy on all: read by a rank", "once", metadata(opened, one_copy=True)),
    Item("records, and a report of them", "a window", monitors),
)


# ---- connections ----------------------------------------------------------------------------------------------------


def connections(ranks: int, late: bool) -> tuple[int, int]:
    """Open files of each rank in a group of gloo, and requests to the store, after an all-reduce and a barrier."""
    os.environ.pop(gloo_groups._CONNECT_LATE, None)
    if late:
        os.environ[gloo_groups._CONNECT_LATE] = "1"
    store = dist.HashStore()
    made: list[dist.ProcessGroupGloo | None] = [None] * ranks
    before = len(os.listdir("/proc/self/fd"))

    def join(rank: int) -> None:
        group = made[rank] = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=60))
        group.allreduce([torch.ones(1)]).wait()
        group.barrier().wait()

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    opened = len(os.listdir("/proc/self/fd")) - before
    keys = store.num_keys()
    made.clear()
    os.environ.pop(gloo_groups._CONNECT_LATE, None)
    return opened // ranks, keys


def main() -> None:
    """Measure all and print it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    worlds = parser.parse_args().ranks
    logging.getLogger("torch").setLevel(logging.ERROR)
    console = Console(width=150)
    table = Table(title="What it costs a rank", title_justify="left", box=None, pad_edge=False)
    for name in ("", "when", *(f"{ranks:,} ranks ({layout_of(ranks)})" for ranks in worlds)):
        table.add_column(name)
    for item in (PLAN, *ITEMS):
        console.print(f"{item.name} ...", style="dim")
        table.add_row(item.name, item.when, *(str(item.measure(layout_of(ranks))) for ranks in worlds))
    console.print(table)
    table = Table(title="Open files of a rank in a gloo group, keys in its store", title_justify="left", box=None)
    for name in ("ranks", "all connect", "connect when used"):
        table.add_column(name, justify="right")
    for ranks in _GLOO_RANKS:
        cells = ["{} files, {} keys".format(*connections(ranks, late)) for late in (False, True)]
        table.add_row(str(ranks), *cells)
    console.print(table)


if __name__ == "__main__":
    main()
