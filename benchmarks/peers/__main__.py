"""The same small GPT on the same processes by every peer: time, memory, bytes sent, start, lines of code.

All peers of a layout are alive at once and take turns: one makes a piece of some steps, the others wait without using
the CPU. See docs/peers.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import default_cache
from benchmarks.peers.field import FIELD, LAYOUTS, Place, sides_of
from benchmarks.peers.measure import Measured, measure_layout, measure_starts
from benchmarks.peers.rows import goals_of, rows_of, tables_of
from benchmarks.peers.task import Task
from benchmarks.ranks import end_on_sigterm, threads_per_rank
from benchmarks.report import finish, say


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    names = [side.name for side in FIELD]
    add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="default: all")
    add("--sides", nargs="+", choices=names, default=None, help="besides torch by hand (default: all)")
    add("--ranks", type=int, default=2, help="processes of layouts that need several (default: %(default)s)")
    add("--layers", type=int, default=4, help="blocks of the model (default: %(default)s)")
    add("--dim", type=int, default=256, help="width of the model (default: %(default)s)")
    add("--seq-len", type=int, default=128, help="bytes of a window (default: %(default)s)")
    add("--batch", type=int, default=8, help="windows of a step, over all ranks (default: %(default)s)")
    add("--pieces", type=int, default=8, help="of each side (default: %(default)s)")
    add("--steps", type=int, default=8, help="optimizer steps of a piece (default: %(default)s)")
    add("--warm-up", type=int, default=4, help="optimizer steps before the first piece (default: %(default)s)")
    add(
        "--starts", type=int, default=2, help="further starts of each side under --start-layouts (default: %(default)s)"
    )
    add(
        "--start-layouts",
        nargs="*",
        choices=LAYOUTS,
        default=["single", "ddp"],
        help="those with further starts (default: single ddp)",
    )
    add("--threads", type=int, default=0, help="CPU threads of a rank (default: the cores divided by the ranks)")
    add("--data", help="a text file or folder (default: the standard library's source)")
    add("--cache", type=Path, default=default_cache(), help="folder of the environments (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = arguments()
    end_on_sigterm()
    task = Task(
        sizes={"layers": options.layers, "dim": options.dim, "heads": 4, "seq_len": options.seq_len},
        batch=options.batch,
        data=options.data,
        warm_up=options.warm_up,
        steps=options.steps,
        pieces=options.pieces,
    )
    results: dict[str, dict[str, Measured]] = {}
    with tempfile.TemporaryDirectory(prefix="trainwright-peers-") as folder:
        for layout in options.layouts:
            ranks = 1 if layout == "single" else options.ranks
            say(f"{layout} on {ranks} process(es)")
            place = Place(layout, ranks, options.cache, Path(folder), task)
            threads = options.threads or threads_per_rank(ranks)
            sides = sides_of(layout, options.sides)
            results[layout] = measure_layout(sides, place, threads)
            if layout in options.start_layouts and options.starts:
                measure_starts(sides, place, threads, options.starts, results[layout])
    rows = rows_of(results)
    result: dict[str, Any] = {"options": {**vars(options), "cache": str(options.cache)}, "rows": rows}
    finish("peers", tables_of(rows, task, options.ranks), goals_of(rows), result)


if __name__ == "__main__":
    main()
