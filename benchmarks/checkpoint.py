"""Time that training is blocked by a checkpoint, speed of writing and reading it, and peak memory.

Data parallel training on the CPU; the model's weights and AdamW's two moments have the given size together. Four sides
save in turns, in the same processes: `RunStateCheckpoint`, the same with `asynchronous=True`, Lightning's
`ModelCheckpoint` with plain DDP, and a plain copy of the files that the first of them wrote. Ours and the copy end when
the disk has everything (fsync); Lightning's ends when the operating system has it.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.quiet import PLAIN_TRAINER
from benchmarks.ranks import run_ranks, say_from_first
from benchmarks.report import Goal, finish, say, table_of
from trainwright.callbacks.save.run_state import RunStateCheckpoint
from trainwright.checkpoint.format.manifest import read_manifest, verify
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.read.run_state import RunState
from trainwright.strategies.contract.registry import make_strategy
from trainwright.trainer.trainer import Trainer

MOST_BLOCKED = 0.1
_BYTES_PER_PARAMETER = 12  # fp32 weight and two moments
_WIDTH = 512
_QUIET = {name: value for name, value in PLAIN_TRAINER.items() if name != "enable_checkpointing"}
_PAUSE_STEPS = 2  # between saves


@dataclass
class Save:
    """Cost of one save.

    Args:
        blocked: seconds that training stood still on the slowest rank.
        total: seconds until the checkpoint could be read.
        peak: MiB of memory that the rank which needed most of it took beyond what it had before.
    """

    blocked: float
    total: float
    peak: float


@dataclass
class Taken:
    """All saves of one side."""

    saves: list[Save] = field(default_factory=list)

    def median_of(self, name: str) -> float:
        """Median over the saves."""
        return median(getattr(save, name) for save in self.saves)


class Model(pl.LightningModule):
    """Square matrices, some 1 MiB each; a step uses each of them once."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        elements = megabytes * 1e6 / _BYTES_PER_PARAMETER
        rows = max(1, round(elements / _WIDTH))
        sizes = [_WIDTH] * (rows // _WIDTH) + ([rows % _WIDTH] if rows % _WIDTH else [])
        self.tables = nn.ParameterList(torch.zeros(size, _WIDTH) for size in sizes)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean of everything."""
        return torch.stack([table.mean() for table in self.tables]).mean() * batch.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW: two numbers of state per parameter."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Watch:
    """Times one hook on all ranks together, and the memory that it takes."""

    def __init__(self) -> None:
        self.saves: list[Save] = []

    def around(self, hook: Callable[[], None], finish: Callable[[], int]) -> None:
        """Call ``hook``, which saves.

        Args:
            hook: as a Trainer calls it.
            finish: waits until the checkpoint can be read, and gives the bytes that are held for copies all the time.
        """
        dist.barrier()
        before = _reset_peak()
        begin = time.perf_counter()
        hook()
        blocked = time.perf_counter() - begin
        held = finish()
        total = time.perf_counter() - begin
        peak = (_peak_memory() - before + held) / 2**20
        slowest = torch.tensor([blocked, total, peak], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.saves.append(Save(*slowest.tolist()))


class TimedRunState(RunStateCheckpoint):
    """Ours, with a watch around each save."""

    def __init__(self, watch: Watch, **options: Any) -> None:
        super().__init__(**options)
        self._watch = watch

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Time those that save."""
        hook = super().on_train_batch_end

        def finish() -> int:
            assert self._saver is not None
            self._saver.wait()
            return self._saver.num_bytes

        if _saves_at(trainer.global_step):
            self._watch.around(lambda: hook(trainer, *args, **kwargs), finish)
        else:
            hook(trainer, *args, **kwargs)


class TimedModelCheckpoint(ModelCheckpoint):
    """Lightning's, with a watch around each save."""

    def __init__(self, watch: Watch, **options: Any) -> None:
        super().__init__(**options)
        self._watch = watch

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Time those that save."""
        hook = super().on_train_batch_end
        if _saves_at(trainer.global_step):
            self._watch.around(lambda: hook(trainer, *args, **kwargs), lambda: 0)
        else:
            hook(trainer, *args, **kwargs)


def _saves_at(step: int) -> bool:
    return step > 0 and step % _PAUSE_STEPS == 0


def _reset_peak() -> int:
    """Begin to watch for the peak of resident memory; the bytes that are resident now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return _status("VmRSS")


def _peak_memory() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    """Bytes, from the kernel's account of this process; 0 where there is none."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


# ---- saving ----------------------------------------------------------------------------------------------------------


def train(side: str, megabytes: float, saves: int, folder: str) -> list[Save]:
    """Train under one side until it has saved ``saves`` times, after one save more that does not count."""
    watch = Watch()
    steps = (saves + 1) * _PAUSE_STEPS
    common: dict[str, Any] = {
        "max_steps": steps,
        "max_epochs": -1,
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        **_QUIET,
    }
    if side == "lightning":
        saver: Any = TimedModelCheckpoint(watch, dirpath=folder, every_n_train_steps=_PAUSE_STEPS, save_top_k=1)
        trainer: pl.Trainer = pl.Trainer(strategy="ddp", callbacks=[saver], **common)
    else:
        options = {"dirpath": folder, "every_n_steps": _PAUSE_STEPS, "asynchronous": side == "asynchronous"}
        saver = TimedRunState(watch, **options)
        trainer = Trainer(strategy=make_strategy("ddp"), callbacks=[saver], **common)
    trainer.fit(Model(megabytes), DataLoader(torch.ones(8, 1), batch_size=1))  # type: ignore[arg-type]
    return watch.saves[1:]


def copy_files(source: Path, folder: Path, saves: int) -> list[Save]:
    """Copy what each rank wrote, each its own file, and wait for the disk."""
    watch, rank = Watch(), dist.get_rank()
    mine = sorted(source.glob("rank_*.safetensors"))[rank :: dist.get_world_size()]

    def copy() -> None:
        for path in mine:
            with open(path, "rb") as read, open(folder / path.name, "wb") as written:
                shutil.copyfileobj(read, written, 2**20)
                written.flush()
                os.fsync(written.fileno())
        dist.barrier()

    for _ in range(saves + 1):
        for path in mine:  # new files: writing over old ones is another, cheaper thing
            (folder / path.name).unlink(missing_ok=True)
        watch.around(copy, lambda: 0)
    return watch.saves[1:]


def measure_saving(megabytes: float, rounds: int, saves: int, folder: str) -> dict[str, Any]:
    """Save under every side in turns, on this rank.

    Args:
        megabytes: of weights and optimizer state, 10^6 bytes each.
        rounds: how often each side trains.
        saves: of each side in each round.
        folder: empty; what is left in it afterwards is the last checkpoint of `ours`, in `ours/`.

    Returns:
        Saves by side, and the bytes of a checkpoint.
    """
    taken: dict[str, Taken] = {side: Taken() for side in ("ours", "asynchronous", "lightning", "copy")}
    names = list(taken)[:3]
    for turn in range(rounds):
        first = turn % len(names)
        for side in names[first:] + names[:first]:
            taken[side].saves += train(side, megabytes, saves, f"{folder}/{side}")
            dist.barrier()
        newest = Path(folder, "ours", f"step={(saves + 1) * _PAUSE_STEPS}")
        os.makedirs(f"{folder}/copy", exist_ok=True)
        taken["copy"].saves += copy_files(newest, Path(folder, "copy"), saves)
        say_from_first(f"{megabytes:g} MB, round {turn + 1}/{rounds}: " + _progress(taken))
    size = sum(path.stat().st_size for path in newest.iterdir())
    return {"taken": {side: [asdict(save) for save in t.saves] for side, t in taken.items()}, "bytes": size}


def _progress(taken: dict[str, Taken]) -> str:
    return ", ".join(f"{side} {1000 * t.saves[-1].blocked:.0f} ms" for side, t in taken.items())


# ---- loading ---------------------------------------------------------------------------------------------------------


def measure_loading(paths: list[str], repeats: int) -> list[list[float]]:
    """Seconds of the slowest rank to read checkpoints in turns: folders of ours, files of Lightning's.

    Ours is verified, by all ranks together, and each reads its rows of every tensor. Of a file every rank reads all.
    """
    taken: list[list[float]] = [[] for _ in paths]
    for _ in range(repeats):
        for path, seconds in zip(paths, taken, strict=True):
            seconds.append(_timed(_load_file if os.path.isfile(path) else _load, path))
    return taken


def _timed(load: Callable[[str], None], path: str) -> float:
    dist.barrier()
    begin = time.perf_counter()
    load(path)
    seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def _load_file(path: str) -> None:
    torch.load(path, map_location="cpu", weights_only=True)


def _load(path: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    problems = verify(path, part=(rank, ranks))
    assert not problems, problems
    dist.barrier()
    state = RunState(path, read_manifest(path))
    state.fill(dict(_rows(state, rank, ranks)))


def _rows(state: RunState, rank: int, ranks: int) -> list[tuple[str, TensorParts]]:
    """This rank's rows of every tensor, as ZeRO cuts them."""
    found = []
    for key in state.keys():  # noqa: SIM118
        shape = state.shape(key)
        length = shape[0] if shape else 1
        chunk = math.ceil(length / ranks)
        first, last = min(rank * chunk, length), min((rank + 1) * chunk, length)
        box = torch.empty((last - first, *shape[1:]), dtype=state.dtype(key))
        offsets = (first, *(0,) * (len(shape) - 1))
        found.append((key, TensorParts(shape, state.dtype(key), [(offsets, box)])))
    return found


# ---- together --------------------------------------------------------------------------------------------------------


def compare(
    megabytes: float, ranks: int, rounds: int, saves: int, parent: str | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of saving and of loading for one size."""
    with tempfile.TemporaryDirectory(prefix="trainwright-benchmark-", dir=parent) as folder:
        many, one = Path(folder, "many"), Path(folder, "one")
        many.mkdir()
        one.mkdir()
        measured = run_ranks(measure_saving, ranks, megabytes, rounds, saves, str(many))[0]
        run_ranks(train, 1, "ours", megabytes, 0, str(one / "ours"))
        loading = _loading_rows(megabytes, ranks, rounds * saves, many, one)
        return saving_rows(megabytes, ranks, measured), loading


def saving_rows(megabytes: float, ranks: int, measured: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per side, of what :func:`measure_saving` returned."""
    taken = {side: Taken([Save(**save) for save in saves]) for side, saves in measured["taken"].items()}
    ours, copy = taken["ours"], taken["copy"]
    labels = {
        "ours": "trainwright",
        "asynchronous": "trainwright, asynchronous",
        "lightning": "Lightning ModelCheckpoint",
        "copy": "copy of the files, fsync",
    }
    return [
        {
            "MB": megabytes,
            "ranks": ranks,
            "side": labels[side],
            "blocked_ms": round(1000 * own.median_of("blocked"), 1),
            "of_ours": round(own.median_of("blocked") / ours.median_of("blocked"), 3),
            "written_ms": round(1000 * own.median_of("total"), 1),
            "MB_per_s": round(measured["bytes"] / 1e6 / own.median_of("total"), 1),
            "of_copy": round(copy.median_of("total") / own.median_of("total"), 3),
            "peak_MiB": round(own.median_of("peak"), 1),
        }
        for side, own in taken.items()
    ]


def _loading_rows(megabytes: float, ranks: int, repeats: int, many: Path, one: Path) -> list[dict[str, Any]]:
    written = {count: next((folder / "ours").iterdir()) for count, folder in ((ranks, many), (1, one))}
    file = next((many / "lightning").glob("*.ckpt"))
    paths = [str(written[ranks]), str(written[1]), str(file)]
    sides = [("trainwright, verified", ranks), ("trainwright, verified", 1), ("Lightning, torch.load", ranks)]
    rows = []
    for target in (ranks, 1):
        taken = run_ranks(measure_loading, target, paths, repeats)[0]
        for (side, source), seconds in zip(sides, taken, strict=True):
            rows.append(_loading_row(megabytes, side, source, target, median(seconds)))
    return rows


def _loading_row(megabytes: float, side: str, source: int, target: int, seconds: float) -> dict[str, Any]:
    return {
        "MB": megabytes,
        "side": side,
        "written_by": source,
        "read_by": target,
        "ms": round(1000 * seconds, 1),
        "MB_per_s": round(megabytes / seconds, 1),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    add = parser.add_argument
    add("--megabytes", type=float, nargs="+", default=[10, 100, 200, 1000], help="default: 10 100 200 1000")
    add("--ranks", type=int, default=2, help="default: %(default)s")
    add("--rounds", type=int, default=2, help="how often each side trains (default: %(default)s)")
    add("--saves", type=int, default=3, help="of each side in each round (default: %(default)s)")
    add("--folder", help="where to write, to measure another disk (default: the folder for temporary files)")
    options = parser.parse_args()
    saving: list[dict[str, Any]] = []
    loading: list[dict[str, Any]] = []
    for megabytes in options.megabytes:
        say(f"{megabytes:g} MB on {options.ranks} rank(s)")
        saved, loaded = compare(megabytes, options.ranks, options.rounds, options.saves, options.folder)
        saving += saved
        loading += loaded
    goals = [
        Goal(f"asynchronous, blocked, of ours at {row['MB']:g} MB", row["of_ours"], MOST_BLOCKED)
        for row in saving
        if row["side"].endswith("asynchronous") and row["MB"] >= 100
    ]
    tables = [
        table_of(f"Saving, medians of {options.rounds} x {options.saves}", saving),
        table_of("Loading: rows of every tensor on each rank; all of a file with torch.load", loading),
    ]
    finish("checkpoint", tables, goals, {"options": vars(options), "rows": saving, "loading": loading})


if __name__ == "__main__":
    main()
