"""Ways to average gradients over the slow link between two nodes: seconds of an average, and of a step under DDP.

Two network namespaces act as two nodes of several ranks each (CPU, gloo): within one, ranks talk over loopback;
between the two lies a cable of ``--link`` (``unshare``, ``nsenter``, ``ip`` and ``tc`` of Linux), which the ranks of a
node share. Sides in turns. ``ratio`` is how much longer all_reduce takes; ``predicted`` is what follows from the bytes
that cross the border of a node, and nothing else: with m nodes of k ranks, of S bytes of gradients,

==================  =====================================================================
``all_reduce``      2 (mk - 1) / mk S: gloo's ring goes along the ranks and once out of each node
``reduce_scatter``  k (m - 1) / m S for the sums, whose parts go straight to their rank, and (mk - 1) / mk S in a ring
``hierarchical``    2 (m - 1) / m S: k parts of S / k, each by an all-reduce of m ranks
==================  =====================================================================
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.alternate import alternate
from benchmarks.report import Goal, finish, table_of
from benchmarks.slow_link import on_two_nodes
from trainwright.strategies.averaging.means import ReplicaMeans
from trainwright.strategies.contract.communication.options import ALL_REDUCE, AVERAGES, HIERARCHICAL

NODES = 2
# Of what the bytes across nodes predict for two levels, that much must be seen.
LEAST_OF_PREDICTED = 0.8


def predicted(way: str, nodes: int, per_node: int) -> float:
    """Times the bytes of all gradients that cross the border of a node, one way, by the table above."""
    ranks = nodes * per_node
    ring = (ranks - 1) / ranks
    if way == ALL_REDUCE:
        return 2 * ring
    return 2 * (nodes - 1) / nodes if way == HIERARCHICAL else per_node * (nodes - 1) / nodes + ring


def time_average(means: ReplicaMeans, way: str, size: int) -> float:
    """Seconds of one average of ``size`` bytes, of the slowest rank."""
    mean, flat = means.by(way), torch.ones(size // 4)
    mean(flat[:1024])  # makes connections
    dist.barrier()
    begin = time.perf_counter()
    mean(flat)
    return _slowest(time.perf_counter() - begin)


def _slowest(seconds: float) -> float:
    slowest = torch.tensor(seconds)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def measure(store: str, mib: int, steps: int, repeats: int) -> list[dict[str, Any]]:
    """On a rank: one row for each way, the same on all ranks."""
    rank, ranks, per_node = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    means = ReplicaMeans([list(range(ranks))], per_node)
    size = mib * 2**20
    alone = alternate({way: partial(time_average, means, way, size) for way in AVERAGES}, repeats, _shown)
    rows = [
        {
            "average_by": way,
            "nodes": NODES,
            "ranks_per_node": per_node,
            "average_seconds": round(median(alone[way]), 3),
            "ratio": round(median(alone[ALL_REDUCE]) / median(alone[way]), 2),
            "predicted": round(predicted(ALL_REDUCE, NODES, per_node) / predicted(way, NODES, per_node), 2),
        }
        for way in AVERAGES
    ]
    if steps:
        from benchmarks.averaging_steps import time_step

        def timed(way: str) -> float:
            return _slowest(time_step(way, NODES, per_node, max(mib // 4, 1), steps))

        taken = alternate({way: partial(timed, way) for way in AVERAGES}, repeats, _shown)
        for row in rows:
            seconds = median(taken[str(row["average_by"])])
            row |= {"step_seconds": round(seconds, 3), "step_ratio": round(median(taken[ALL_REDUCE]) / seconds, 2)}
    return rows


def _shown(seconds: float) -> str:
    return f"{seconds:.3f} s"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.averaging", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--link", default="100mbit", help="rate of the cable between the nodes (default: %(default)s)")
    add("--ranks-per-node", type=int, default=2, help="of each of the two (default: %(default)s)")
    add("--mib", type=int, default=4, help="of gradients, a multiple of 4 (default: %(default)s)")
    add("--steps", type=int, default=3, help="timed ones of a run under DDP, 0: none (default: %(default)s)")
    add("--repeats", type=int, default=3, help="rounds (default: %(default)s)")
    add("--store", default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.store is not None:
        print(json.dumps(measure(given.store, given.mib, given.steps, given.repeats)), flush=True)
        os._exit(0)  # threads of gloo that outlive the interpreter's end would abort the process
    more = ["--mib", str(given.mib), "--steps", str(given.steps), "--repeats", str(given.repeats)]
    with tempfile.TemporaryDirectory(prefix="trainwright-benchmark-") as folder:
        store = str(Path(folder, "store"))
        rows = on_two_nodes(given.link, given.ranks_per_node, "benchmarks.averaging", ["--store", store, *more])
    two_levels = next(row for row in rows if row["average_by"] == HIERARCHICAL)
    goal = Goal(
        "all_reduce to hierarchical, seconds of an average",
        two_levels["ratio"],
        round(LEAST_OF_PREDICTED * two_levels["predicted"], 2),
        at_least=True,
    )
    title = f"Averages of {given.mib} MiB over a cable of {given.link} between nodes"
    finish("averaging", [table_of(title, rows)], [goal], {"rows": rows, "link": given.link})


if __name__ == "__main__":
    main()
