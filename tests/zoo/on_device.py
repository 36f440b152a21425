"""Train cells of the zoo on a GPU that the ranks share: ``python -m tests.zoo.on_device [--all] [--out FILE]``.

Outcomes are compared with ``outcomes.json``; the reference is Lightning on that GPU. Without one, ``--device
simulated`` finds tensors left on the CPU (:mod:`tests.simulated_device`); ``--device cpu`` tries this out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import chdir
from pathlib import Path
from typing import Any

from tests import simulated_device
from tests.pool import RankPool
from tests.shared_device import on_device
from tests.zoo.cells import find, tried
from tests.zoo.record import shortened
from tests.zoo.table import recorded

TIMEOUT = 120.0


def chosen(everything: bool, themes: list[str] | None, limit: int | None) -> dict[tuple[str, str], dict[str, bool]]:
    """Return cells, ``(theme, row) -> {layout: with certificate}``: all, or those of `make test`."""
    if everything:
        os.environ["ZOO"] = "all"
    from tests.zoo.test_zoo import SAMPLE

    names = [key for key in SAMPLE if themes is None or key[0] in themes]
    random.Random(1).shuffle(names)
    return {key: SAMPLE[key] for key in names[:limit]}


def outcomes_of(pool: RankPool, device: str, theme: str, name: str, layouts: dict[str, bool]) -> dict[str, str]:
    """Return the outcome of each cell of a row, on ranks that share ``device``: ``"cuda"`` or ``"cpu"``."""

    def ranks(function: Any, world_size: int, *args: Any, timeout: float = TIMEOUT, **_: Any) -> list[Any]:
        case = (None if world_size == 1 else device, function.__module__, function.__qualname__)
        return pool.run(on_device, world_size, device, case, *args, timeout=timeout, init_group=False)

    try:
        return tried(ranks, theme, find(theme, name), layouts, TIMEOUT)
    except AssertionError as error:
        return dict.fromkeys(layouts, f"no reference: {' '.join(str(error).split())[-300:]}")


def work(options: argparse.Namespace) -> None:
    """Try this worker's share of the cells; write the outcomes that are there so far after each row."""
    pool, known = RankPool(), recorded()
    rows = list(chosen(options.all, options.themes, options.limit).items())
    outcomes: dict[str, str] = {}
    for (theme, name), layouts in rows[options.share :: options.workers]:
        for layout, outcome in outcomes_of(pool, options.device, theme, name, layouts).items():
            outcomes[f"{theme}:{name} | {layout}"] = outcome
            if shortened(outcome) != known[theme][name][layout]:
                print(f"{theme}:{name} | {layout}: {outcome[:400]} instead of {known[theme][name][layout]}", flush=True)
        options.out.write_text(json.dumps(outcomes))


def main() -> None:
    """Train the cells in several workers, and print those whose outcome differs from the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", simulated_device.NAME, "cpu"), default="cuda")
    parser.add_argument("--all", action="store_true", help="all cells (default: those of make test)")
    parser.add_argument("--themes", nargs="+", help="files of the zoo (default: all)")
    parser.add_argument("--limit", type=int, help="at most so many modules")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--out", type=Path, help="file of the outcomes")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share is not None:
        # Rows write their data into the current folder.
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            work(options)
        return
    if options.device == simulated_device.NAME:
        simulated_device.compiled()
    # Without the first, asking whether there is a GPU would keep a forked process from using it.
    environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1"}
    started, outcomes = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{share}.json") for share in range(options.workers)]
        command = [sys.executable, "-m", "tests.zoo.on_device", *sys.argv[1:], f"--workers={options.workers}"]
        workers = [
            subprocess.Popen([*command, f"--share={share}", f"--out={file}"], env=environment)
            for share, file in enumerate(files)
        ]
        for worker in workers:
            worker.wait()
        for file in files:
            outcomes |= json.loads(file.read_text()) if file.exists() else {}
    counts = Counter(outcome.partition(":")[0] for outcome in outcomes.values())
    if options.out:
        options.out.write_text(json.dumps({"counts": counts, "cells": outcomes}, indent=1))
    print(f"{time.monotonic() - started:.0f} s, {len(outcomes)} cells: {dict(counts)}")


if __name__ == "__main__":
    main()
