"""Bytes that a rank holds and sends under each strategy, beside the formulas of its page, on a small GPT.

AdamW, one micro-batch a step, in each precision. Held are parameters, gradients and optimizer state at the end of a
step, of the rank that holds most; sent is what the best algorithms send for the collectives of a step, mean over the
ranks, as ``CommunicationMeter`` counts it, of six steps. Formulas of what is sent along the axes of a layout are those
of ``benchmarks.communication``; the others stand in docs/strategies. A parameter server answers between the steps of
its workers, so that a part of an answer may count in a step before or after the six.

Run: python -m benchmarks.strategy_costs [--ranks 2 4]; with --page it writes the tables of docs/strategies.md.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from benchmarks.communication import AXES, HALVES, Axis, Work, module_of, train, work_of
from benchmarks.layouts import Observe
from benchmarks.ranks import run_ranks, say_from_first
from benchmarks.report import finish, say, table_of
from trainwright.recipes.gpt.model import GPTConfig

PRECISIONS = ("32", *HALVES)
PAGE = Path(__file__).parents[1] / "docs" / "strategies.md"
_MARK, _END = "<!-- benchmarks.strategy_costs -->", "<!-- end -->"
# Optimizer steps between two averages of local updates.
_EVERY = 3
# Steps that are looked at, after some in which optimizers make their state; averages are in the last of every three.
_BEFORE, _STEPS = 3, 6


class Window(Observe):
    """Looks at several steps in a row, as :class:`~benchmarks.layouts.Observe` at one."""

    def __init__(self) -> None:
        super().__init__(_BEFORE + 1)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Count to here, if it is the last of them."""
        if trainer.global_step == _BEFORE + _STEPS:
            super().on_train_batch_end(trainer, pl_module, *args)


@dataclass(frozen=True)
class Cost:
    """One line of the table.

    Args:
        axis: strategy, options, and least bytes that it sends per rank and step.
        held: bytes of the rank that holds most; P is 4 bytes for each parameter in what is known of the work.
        formula: the same in words: P, N as on the page.
        sent: what it sends, in words.
        halved: the same with bf16-mixed or 16-mixed; empty: as in fp32.
    """

    axis: Axis
    held: Callable[[Work], float]
    formula: str
    sent: str
    halved: str = ""


def _whole(work: Work) -> float:
    return 4 * work.dense


def _rows(work: Work) -> float:
    return 4 * work.dense / work.ranks


def _parameters_and_rows(work: Work) -> float:
    return work.dense + 3 * work.dense / work.ranks


def _average(work: Work) -> float:
    return 2 * work.share * work.dense / _EVERY


def _pushed_and_pulled(work: Work) -> float:
    """Each worker's gradients and its parameters, those of the worker beside the server too."""
    return 2 * work.dense


_LOCAL = {"sync_every": _EVERY}
_ALL_REDUCE = "8 P (N - 1) / N"
COSTS: dict[str, Cost] = {
    "ddp": Cost(AXES["ddp"], _whole, "16 P", _ALL_REDUCE),
    "zero1": Cost(AXES["zero1"], _parameters_and_rows, "4 P + 12 P / N", _ALL_REDUCE),
    "zero2": Cost(AXES["zero2"], _parameters_and_rows, "4 P + 12 P / N", "4 P (m + 1) (N - 1) / N"),
    "zero3": Cost(
        AXES["zero3"],
        _rows,
        "16 P / N",
        "m (12 P - 4 O) (N - 1) / N",
        "m (12 P - 4 O - 4 W) (N - 1) / N",
    ),
    "tensor": Cost(
        AXES["tensor"],
        lambda w: 4 * (w.matrices / w.ranks + w.vectors),
        "16 Pw + 16 Ps / N",
        "32 A B m (N - 1) / N, and the head",
        "16 A B m (N - 1) / N, and the head",
    ),
    "pipeline": Cost(AXES["pipeline"], _rows, "16 P / N, about", "8 A m v (N - 1) / N"),
    "context, ring": Cost(
        AXES["context, ring"],
        _parameters_and_rows,
        "4 P + 12 P / N (stage 1)",
        "3 B m (N - 1) K, and as `zero1`",
        "2 B m (N - 1) K, and as `zero1`",
    ),
    "expert": Cost(
        AXES["expert"],
        lambda w: _parameters_and_rows(w) + 4 * w.experts / w.ranks,
        "4 P + 12 P / N (stage 1), experts 16 P / N",
        "16 L m n (D + k) q (N - 1), and as `zero1`",
    ),
    "parameter_server": Cost(
        Axis("parameter_server", {}, _pushed_and_pulled, lambda n: n),
        lambda w: 2 * w.dense + 3 * w.dense,
        "8 P + 12 P / S (S = 1)",
        "8 P",
    ),
    "local_sgd": Cost(Axis("local_sgd", _LOCAL, _average, lambda n: n), _whole, "16 P", "8 P (N - 1) / N / H"),
    "diloco": Cost(
        Axis("diloco", _LOCAL, _average, lambda n: n),
        lambda w: _whole(w) + 2 * w.dense,
        "16 P + 8 P",
        "8 P (N - 1) / N / H",
    ),
    "hybrid: zero3 x tensor 2": Cost(
        AXES["zero3 x tensor 2"],
        lambda w: 4 * (w.matrices / w.ranks + 2 * w.vectors / w.ranks),
        "16 Ps / S",
        "the sum",
        "the sum",
    ),
    "hybrid: zero3 x pipeline": Cost(AXES["zero3 x pipeline"], _rows, "16 Ps / S", "the sum", "the sum"),
}


def measure(name: str, config: GPTConfig, samples: int, precision: str) -> dict[str, Any]:
    """Train some steps on this rank and return the row; every rank returns the same.

    Args:
        name: a key of :data:`COSTS`.
        config: sizes of the model.
        samples: of one data rank and step.
        precision: as the Trainer takes it.
    """
    cost, ranks = COSTS[name], dist.get_world_size()
    axis, observe = cost.axis, Window()
    module = module_of(axis, config)
    work = work_of(module, samples, ranks, precision)
    train(axis, module, samples, _BEFORE + _STEPS, observe, precision)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, (observe.held, observe.least))
    held, sent = max(held for held, _ in everyone), mean(least for _, least in everyone) / _STEPS
    expected_held, expected_sent = cost.held(work), axis.floor(work)
    return {
        "strategy": name,
        "precision": precision,
        "ranks": ranks,
        "held": held,
        "held by formula": round(expected_held),
        "held ratio": round(held / expected_held, 3),
        "formula": cost.formula,
        "sent": round(sent),
        "sent by formula": round(expected_sent),
        "sent ratio": round(sent / expected_sent, 3) if expected_sent else None,
    }


def measure_all(names: list[str], config: GPTConfig, samples: int, precisions: list[str]) -> list[dict[str, Any]]:
    """One row per strategy and precision; called on every rank."""
    rows = []
    for name, precision in itertools.product(names, precisions):
        rows.append(measure(name, config, samples, precision))
        held, sent = rows[-1]["held ratio"], rows[-1]["sent ratio"]
        say_from_first(f"{name}, {precision}: holds {held}, sends {sent} of the formula")
    return rows


def possible_on(ranks: int) -> list[str]:
    """Strategies that mean something on so many ranks: two axes need four."""
    return [name for name in COSTS if ranks >= 4 or not name.startswith("hybrid")]


def for_people(row: dict[str, Any]) -> dict[str, Any]:
    """The row with bytes as KiB."""
    sizes = ("held", "held by formula", "sent", "sent by formula")
    return {name: round(value / 1024, 1) if name in sizes else value for name, value in row.items()}


def page_of(rows: list[dict[str, Any]]) -> str:
    """The tables of docs/strategies.md: what is held, and what is sent in fp32 and in 16-bit precision.

    ``bf16-mixed`` and ``16-mixed`` send the same but for 4 bytes or less of the scale of the loss.
    """
    found = {(row["strategy"], row["precision"], row["ranks"]): row for row in rows}
    ranks = sorted({row["ranks"] for row in rows})

    def cells(name: str, precision: str, kind: str) -> list[str]:
        measured = [found.get((name, precision, n)) for n in ranks]
        return ["" if row is None else f"{_kib(row[kind])} ({_kib(row[f'{kind} by formula'])})" for row in measured]

    on = [f"{n} ranks" for n in ranks]
    held = [["", "held", *on]]
    sent = [["", "sent per step, fp32", *on, "16 bit", *on]]
    for name, cost in COSTS.items():
        held.append([name, f"`{cost.formula}`", *cells(name, "32", "held")])
        halved = cells(name, HALVES[0], "sent")
        sent.append([name, cost.sent, *cells(name, "32", "sent"), cost.halved or "the same", *halved])
    return "\n\n".join(map(_markdown, (held, sent)))


def _kib(size: float) -> str:
    return f"{round(size / 1024):,}"


def _markdown(lines: list[list[str]]) -> str:
    ruled = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in ruled)


def write_page(rows: list[dict[str, Any]], page: Path = PAGE) -> None:
    """Put the tables between the marks of a page."""
    before, _, rest = page.read_text().partition(_MARK)
    page.write_text(f"{before}{_MARK}\n\n{page_of(rows)}\n\n{_END}{rest.partition(_END)[2]}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strategy_costs", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4], help="how many (default: 2 4)")
    add("--strategies", nargs="+", choices=COSTS, default=list(COSTS), help="default: all")
    add("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="default: all")
    add("--layers", type=int, default=4, help="blocks of the model (default: %(default)s)")
    add("--dim", type=int, default=64, help="width of the model (default: %(default)s)")
    add("--seq-len", type=int, default=64, help="positions of a sample (default: %(default)s)")
    add("--samples", type=int, default=4, help="of one data rank and step (default: %(default)s)")
    add("--page", action="store_true", help="write the tables into docs/strategies.md")
    options = parser.parse_args()
    config = GPTConfig(layers=options.layers, dim=options.dim, heads=4, seq_len=options.seq_len, tied_head=False)
    rows = []
    for ranks in options.ranks:
        say(f"{ranks} ranks")
        names = [name for name in options.strategies if name in possible_on(ranks)]
        rows += run_ranks(measure_all, ranks, names, config, options.samples, options.precisions)[0]
    if options.page:
        write_page(rows)
    sizes = {name: getattr(options, name) for name in ("layers", "dim", "seq_len", "samples")}
    title = f"KiB held by the fullest rank, and sent per rank and step, AdamW; {sizes}"
    finish("strategy_costs", [table_of(title, [for_people(row) for row in rows])], [], {"model": sizes, "rows": rows})


if __name__ == "__main__":
    main()
