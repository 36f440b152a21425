"""How long `trainwright plan` takes, and how far predicted bytes are from those that are alive on ranks.

Planning is timed in this process for a model of 68 G parameters on 1, 1,024 and 100,000 H100, batches and all. Bytes
are those of the fullest rank of each stage at its fullest moment, over the layouts of the parity matrix
(`tests/parity/test_layouts.py`) and the data-parallel strategies, on CPU ranks; this process predicts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.ranks import run_ranks
from benchmarks.report import Goal, finish, say, table_of
from tests.parity.layouts import LayoutCase
from tests.parity.test_layouts import FOUR, TWO
from tests.trainer.planning.bytes_of_ranks import measured, predictor
from trainwright.trainer.compose import compose
from trainwright.trainer.planning.search import plan

WORLDS = (1, 1024, 100_000)
MOST_SECONDS, WITHIN = 30.0, 0.05
_SIZE = ("recipe=llama_3d", "size=70b", "device=h100", "precision=bf16-mixed", "global_batch_size=100000")


def time_of(devices: int) -> dict[str, Any]:
    """Seconds of planning for so many ranks."""
    began = time.process_time()
    found = plan(compose(None, [*_SIZE, f"devices={devices}"]))
    return {
        "ranks": devices,
        "seconds": round(found.seconds, 2),
        "of a core": round(time.process_time() - began, 2),
        "ways weighed": found.considered,
        "possible": len(found.ranked),
        "not": len(found.refused),
        "best": found.best.title if found.best is not None else "none",
    }


def cases() -> dict[str, tuple[int, LayoutCase]]:
    """Name -> ranks and layout."""
    found: dict[str, tuple[int, LayoutCase]] = {}
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        for accumulation in (1, 2):
            case = LayoutCase(
                "gpt-untied", {}, strategy=strategy, accumulation=accumulation, global_batch_size=16, samples=96
            )
            found[f"{strategy}, accumulation {accumulation}"] = (2, case)
    return found | {k: (2, v) for k, v in TWO.items()} | {k: (4, v) for k, v in FOUR.items()}


def rows_of(name: str, world_size: int, case: LayoutCase) -> list[dict[str, Any]]:
    """One row for each place along the pipeline."""
    found = predictor(case.network, case.length)
    places = found.all_moments(case, world_size)
    alive = run_ranks(measured, world_size, case, found.layout.data_ranks)
    rows = []
    for place, moments in enumerate(places):
        most = max(each for rank, each in enumerate(alive) if found.layout.coordinates(rank)["pipeline"] == place)
        held = max(moments, key=lambda each: each.total + each.host)
        error = (held.total + held.host) / most - 1
        predicted = round(held.total + held.host)
        row = {"layout": name, "stage": place, "alive": most, "predicted": predicted, "error": round(error, 4)}
        rows.append({**row, "at": held.moment})
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="*", default=list(WORLDS), help="ranks (default: %(default)s)")
    parser.add_argument("--layouts", nargs="*", default=None, help="parts of names of layouts (default: all)")
    options = parser.parse_args()
    times = []
    for devices in options.worlds:
        times.append(time_of(devices))
        say(f"{devices} ranks: {times[-1]['seconds']} s")
    rows: list[dict[str, Any]] = []
    for name, (world_size, case) in cases().items():
        if options.layouts is not None and not any(part in name for part in options.layouts):
            continue
        rows += rows_of(name, world_size, case)
        say(f"{name}: {100 * rows[-1]['error']:+.1f} %")
    goals = [
        Goal(
            "seconds of a core for a plan, at the most", max((t["of a core"] for t in times), default=0.0), MOST_SECONDS
        )
    ]
    if rows:
        inside = sum(abs(row["error"]) <= WITHIN for row in rows) / len(rows)
        goals.append(Goal(f"part of the ranks whose bytes are within {100 * WITHIN:.0f} %", inside, 0.8, at_least=True))
    tables = [table_of("plans", times), table_of("most bytes alive on a rank in a step", rows)]
    finish(
        "planner",
        [each for each, has in zip(tables, (times, rows), strict=True) if has],
        goals,
        {"times": times, "rows": rows},
    )


if __name__ == "__main__":
    main()
