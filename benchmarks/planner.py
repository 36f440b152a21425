"""How long `trainwright plan` takes, and how far predicted bytes are from those that are alive on ranks.

Planning is timed in this process for a model of 68 G parameters on 1, 1,024 and 100,000 H100, batches and all. Bytes
are those of the fullest rank of each stage at its fullest moment, over the layouts of the parity matrix
(`tests/parity/test_layouts.py`) and the data-parallel strategies, on CPU ranks; this process predicts. Layouts with
experts on several ranks are predicted with the part of an even routing that arrived at the fullest rank, and once more
with an even one.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from benchmarks.ranks import run_ranks
from benchmarks.report import Goal, finish, say, table_of
from tests.parity.layouts import LayoutCase
from tests.parity.test_layouts import EIGHT, FOUR, TWO
from tests.planning.bytes_of_ranks import measured, predictor
from trainwright.command.schema.compose import compose
from trainwright.planning.memory.peak import Held
from trainwright.planning.model.experts import EVEN, Routing
from trainwright.planning.search.search import plan

_CHECKPOINTED = {"activation_checkpointing": "full"}
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
        found[f"{strategy}, checkpointing"] = (2, replace(case, accumulation=1, options=_CHECKPOINTED))
    return (
        found
        | {k: (2, v) for k, v in TWO.items()}
        | {k: (4, v) for k, v in FOUR.items()}
        | {k: (8, v) for k, v in EIGHT.items()}
    )


def all_measured(work: list[tuple[LayoutCase, int]]) -> list[tuple[int, Routing]]:
    """On a rank: the most bytes alive under one layout after the other."""
    return [measured(case, data_ranks) for case, data_ranks in work]


def rows_of(world_size: int, chosen: dict[str, LayoutCase]) -> list[dict[str, Any]]:
    """One row for each layout and place along the pipeline; ranks are started once for all of them."""
    layouts = {name: predictor(case.network, case.length).layout_of(case, world_size) for name, case in chosen.items()}
    work = [(case, layouts[name].data_ranks) for name, case in chosen.items()]
    alive = run_ranks(all_measured, world_size, work)
    rows = []
    for index, (name, case) in enumerate(chosen.items()):
        for place in range(layouts[name].pipeline):
            ranks = [rank for rank in range(world_size) if layouts[name].coordinates(rank)["pipeline"] == place]
            most, routing = max((alive[rank][index] for rank in ranks), key=lambda each: each[0])
            even, told = (fullest(case, world_size, place, assumed) for assumed in (EVEN, routing))
            predicted = round(told.total + told.host)
            row = {"layout": name, "stage": place, "alive": most, "predicted": predicted}
            row |= {"error": round(predicted / most - 1, 4), "at": told.moment}
            has_experts = layouts[name].expert > 1
            row["arrived"] = round(routing.received, 3) if has_experts else None
            row["error if even"] = round((even.total + even.host) / most - 1, 4) if has_experts else None
            rows.append(row)
    return rows


def fullest(case: LayoutCase, world_size: int, place: int, routing: Routing) -> Held:
    """Return the predicted peak of a rank at a place along the pipeline."""
    moments = predictor(case.network, case.length).all_moments(case, world_size, routing)[place]
    return max(moments, key=lambda each: each.total + each.host)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument(
        "--worlds",
        type=int,
        nargs="*",
        default=list(WORLDS),
        help="ranks to plan for (default: %(default)s; none: leave it out)",
    )
    parser.add_argument(
        "--layouts", nargs="*", default=None, help="parts of names of layouts (default: all; none: leave it out)"
    )
    options = parser.parse_args()
    times = []
    for devices in options.worlds:
        times.append(time_of(devices))
        say(f"{devices} ranks: {times[-1]['seconds']} s")
    rows: list[dict[str, Any]] = []
    for world_size in (2, 4, 8):
        chosen = {
            name: case
            for name, (ranks, case) in cases().items()
            if ranks == world_size and (options.layouts is None or any(part in name for part in options.layouts))
        }
        if chosen:
            began = time.monotonic()
            rows += rows_of(world_size, chosen)
            say(f"{world_size} ranks: {len(chosen)} layouts in {time.monotonic() - began:.0f} s")
    goals = []
    if times:
        most = max(each["of a core"] for each in times)
        goals.append(Goal("seconds of a core for a plan, at the most", most, MOST_SECONDS))
    if rows:
        inside = sum(abs(row["error"]) <= WITHIN for row in rows) / len(rows)
        goals.append(Goal(f"part of the ranks whose bytes are within {100 * WITHIN:.0f} %", inside, 1.0, at_least=True))
    titles = {"plans": times, "most bytes alive on a rank in a step": rows}
    tables = [table_of(title, found) for title, found in titles.items() if found]
    finish("planner", tables, goals, {"times": times, "rows": rows})


if __name__ == "__main__":
    main()
