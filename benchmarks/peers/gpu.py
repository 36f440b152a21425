"""The GPU page: tokens per second, MFU and memory of every peer at sizes of a language model, recorded as JSON.

bf16, compiled blocks, flash attention. One side at a time holds the devices; sides take turns run by run. On one GPU
the layout ``single``, on several also ``ddp``, ``zero2``, ``zero3`` and ``tensor``. ``--device cpu --sizes nano`` tries
it out without a GPU. See docs/peers.md.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.flops import model_flops_utilization
from benchmarks.peers.environments import ENVIRONMENTS, default_cache
from benchmarks.peers.field import FIELD, LAYOUTS, Place, sides_of
from benchmarks.peers.measure import Measured, measure_alone
from benchmarks.peers.rows import rows_of, table_of_errors
from benchmarks.peers.task import Task
from benchmarks.ranks import end_on_sigterm, threads_per_rank
from benchmarks.report import finish, machine, say, table_of
from trainwright import compose
from trainwright.recipes.gpt.model import GPT

SIZES = ("125m", "350m", "1b", "3b")
# Windows of a device and step: what 80 GB hold at the smaller sizes, and 141 GB at 3b.
_MICRO_BATCHES = {"125m": 32, "350m": 16, "1b": 8, "3b": 4}
_RESULTS = Path(__file__).parents[1] / "results"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    devices = torch.cuda.device_count()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.gpu", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    names = [side.name for side in FIELD]
    add("--sizes", nargs="+", default=list(SIZES), help="as in trainwright fit size=... (default: %(default)s)")
    add("--layouts", nargs="+", choices=LAYOUTS, default=None, help="default: those for the devices that are here")
    add("--sides", nargs="+", choices=names, default=None, help="besides torch by hand (default: all)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the page out (default: %(default)s)")
    add("--ranks", type=int, default=max(devices, 1), help="devices of layouts of several (default: all)")
    add("--micro-batch", type=int, default=None, help="windows of a device and step (default: by size, 4 for others)")
    add("--no-compile", action="store_true", help="do not compile (default: blocks are compiled)")
    add("--rounds", type=int, default=2, help="runs of each side (default: %(default)s)")
    add("--pieces", type=int, default=3, help="of a run (default: %(default)s)")
    add("--steps", type=int, default=10, help="optimizer steps of a piece (default: %(default)s)")
    add("--warm-up", type=int, default=10, help="optimizer steps before the first piece (default: %(default)s)")
    add("--data", help="a text file or folder (default: the standard library's source)")
    add("--cache", type=Path, default=default_cache(), help="folder of the environments (default: %(default)s)")
    add("--out", type=Path, default=_RESULTS, help="folder of the result (default: %(default)s)")
    options = parser.parse_args()
    if options.device == "cuda" and not devices:
        parser.error("there is no GPU here; --device cpu --sizes nano tries the page out without one")
    if options.device == "cuda" and options.ranks > devices:
        parser.error(f"--ranks {options.ranks}: there are {devices} GPU(s) here")
    if options.layouts is None:
        options.layouts = ["single"] if options.ranks == 1 else ["single", "ddp", "zero2", "zero3", "tensor"]
    elif options.ranks == 1 and options.layouts != ["single"]:
        parser.error(f"--layouts {' '.join(options.layouts)} want several devices; type --ranks 2 or more")
    return options


def sizes_of(name: str) -> dict[str, Any]:
    """Arguments of ``GPTConfig`` of a size."""
    config = compose("gpt", [f"size={name}"]).module.config
    return {key: config[key] for key in config if key != "_target_"}


def task_of(size: str, layout: str, options: argparse.Namespace) -> Task:
    """Return the task; a step has the same windows under all layouts of several devices."""
    on_gpu = options.device == "cuda"
    micro_batch = options.micro_batch or _MICRO_BATCHES.get(size, 4)
    return Task(
        sizes=sizes_of(size),
        batch=micro_batch * (1 if layout == "single" else options.ranks),
        device=options.device,
        bf16=True,
        compile=not options.no_compile,
        flash=on_gpu,
        data=options.data,
        warm_up=options.warm_up,
        steps=options.steps,
        pieces=options.pieces,
    )


def rows_for(size: str, task: Task, ranks: int, found: dict[str, dict[str, Measured]]) -> list[dict[str, Any]]:
    """One row per side: tokens per second, MFU, GiB, and what the page of peers tells too."""
    with torch.device("meta"):
        model = GPT(task.config)
    name = torch.cuda.get_device_name() if task.device == "cuda" else "cpu"
    rows = []
    for row in rows_of(found):
        measured = found[row["layout"]][row["side"]]
        seconds = median(piece.wall for piece in measured.pieces) / task.steps if measured.pieces else None
        tokens = None if seconds is None else task.batch * task.config.seq_len / seconds
        mfu = None if tokens is None else model_flops_utilization(model, tokens, name, ranks)
        peak = max((piece.peak for piece in measured.pieces), default=None)
        rows.append(
            {
                "size": size,
                "layout": row["layout"],
                "side": row["side"],
                "tokens_per_s": None if tokens is None else round(tokens),
                "mfu": None if mfu is None else round(mfu, 4),
                "gib": None if peak is None else round(peak / 2**30, 2),
                **{key: row[key] for key in ("step_ms", "ratio", "start_s", "loss_diff", "version", "error")},
            }
        )
    return rows


def record(folder: Path, result: dict[str, Any]) -> Path:
    """Write the result under a name made of the device and the date; an earlier one of that day is kept."""
    device = re.sub(r"\W+", "-", result["device"]).strip("-").lower()
    stem = f"peers-{device}-{result['date'][:10]}"
    folder.mkdir(parents=True, exist_ok=True)
    taken = len(list(folder.glob(f"{stem}*.json")))
    file = folder / (f"{stem}.json" if not taken else f"{stem}-{taken + 1}.json")
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return file


def versions() -> dict[str, str | None]:
    """Of what took part."""
    own = {name: version(name) for name in ("torch", "lightning", "trainwright")}
    return {**own, "cuda": torch.version.cuda, **{name: each.version() for name, each in ENVIRONMENTS.items()}}


def main() -> None:
    """Measure, record and print."""
    options = arguments()
    end_on_sigterm()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="trainwright-peers-") as folder:
        for size in options.sizes:
            for layout in options.layouts:
                ranks = 1 if layout == "single" else options.ranks
                task = task_of(size, layout, options)
                say(f"{size}, {layout} on {ranks} device(s), {task.batch} windows of {task.config.seq_len} a step")
                place = Place(layout, ranks, options.cache, Path(folder), task)
                sides = sides_of(layout, options.sides)
                found = {layout: measure_alone(sides, place, threads_per_rank(ranks), options.rounds)}
                rows += rows_for(size, task, ranks, found)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    result = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "devices": options.ranks,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
        "machine": machine(),
        "options": settings,
        "rows": rows,
    }
    say(f"recorded in {record(options.out, result)}")
    ran = [{key: row[key] for key in row if key not in ("version", "error")} for row in rows if row["tokens_per_s"]]
    tables = [table_of(f"GPT, bf16, {result['device']}", ran)] if ran else []
    finish("peers_gpu", [*tables, *table_of_errors(rows, "size", "layout")], [], {"rows": rows})


if __name__ == "__main__":
    main()
