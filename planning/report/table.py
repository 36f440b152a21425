"""Plan as text for a terminal, and as plain values."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from trainwright.planning.memory.peak import KINDS
from trainwright.planning.search.plan import USABLE, LayoutCandidate, Plan, Refusal

SHOWN = 10
_SHOWN_REASONS, _SHOWN_NAMES = 6, 3
# Wider than any table.
_NO_WIDTH = 10_000
_GIB = 2**30


def print_plan(plan: Plan, console: Console) -> None:
    """Print a plan, as wide as the terminal; into files and pipes as wide as its tables."""
    tables = [_layouts(plan), _details(plan)] if plan.ranked else []
    if not console.is_terminal:  # a file or a pipe has no width
        console.width = max([console.width, *(_width_of(table, console) for table in tables)])
    for line in headline(plan):
        console.print(line, soft_wrap=True)
    if plan.ranked:
        for table in tables:
            console.print(table)
        console.print("\noverrides of the first layout:", style="bold")
        assert plan.best is not None
        console.print(f"  {command_of(plan.best)}", soft_wrap=True, markup=False)
    for note in plan.notes:
        console.print(f"\n{note}", soft_wrap=True, markup=False)
    if plan.refused:
        console.print("\nnot possible:", style="bold")
        for line in reasons(plan.refused):
            console.print(f"  {line}", soft_wrap=True, markup=False)


def _width_of(table: Table, console: Console) -> int:
    """Return the columns of a table with one line per row."""
    return Measurement.get(console, console.options.update(max_width=_NO_WIDTH), table).maximum


def headline(plan: Plan) -> list[str]:
    """Return the lines about the request and the number of layouts."""
    batch = "each layout's own batch" if plan.global_batch_size is None else f"{plan.global_batch_size} samples a step"
    return [
        f"{plan.name}: {plan.parameters:,} parameters, {plan.precision}, {batch}, {plan.world_size} x "
        f"{plan.profile.name} ({USABLE * plan.profile.memory_bytes / _GIB:.1f} GiB usable of each)",
        *([plan.profile.source] if plan.profile.source else []),
        f"{len(plan.ranked)} layouts possible, {len(plan.refused)} not; {plan.considered} variants evaluated in "
        f"{plan.seconds:.1f} s",
    ]


def command_of(candidate: LayoutCandidate) -> str:
    """Return the overrides of a candidate in one line."""
    return " ".join(shlex.quote(word) for word in candidate.overrides)


def _layouts(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("#", justify="right")
    table.add_column("layout", min_width=24)
    for name in ("s/step", "samples/s", "MFU", "waits", "bubble", "GiB", "micro", "accum."):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("with")
    for number, each in enumerate(plan.ranked[:SHOWN], 1):
        table.add_row(str(number), *cells_of(plan, each))
    return table


def cells_of(plan: Plan, candidate: LayoutCandidate) -> tuple[str, ...]:
    """Return the cells of a candidate's row, without its number."""
    time, work = candidate.time, candidate.work
    return (
        candidate.title,
        f"{time.total:.3g}",
        f"{candidate.samples_per_second:.4g}",
        f"{100 * utilization(plan, candidate):.0f} %",
        f"{100 * time.exposed / time.total:.0f} %",
        f"{100 * time.bubble / time.total:.0f} %",
        f"{candidate.memory.total / _GIB:.1f}",
        str(work.micro_batch),
        str(candidate.accumulation) if work.parts == 1 else f"{candidate.accumulation} x {work.parts}",
        ", ".join(extras(candidate)),
    )


def extras(candidate: LayoutCandidate) -> list[str]:
    """Return what a candidate uses besides its axes."""
    work, cut = candidate.work, candidate.cut
    found = [f"{work.schedule} of {work.stages_per_rank}" if work.stages_per_rank > 1 else work.schedule]
    found = found if work.has_pipeline else []
    found += ["checkpointing"] if cut.checkpointing == "full" else []
    found += [f"offload of {work.offload}"] if work.offload != "none" else []
    found += ["sequence parallel"] if cut.sequence_parallel else []
    return found


def utilization(plan: Plan, candidate: LayoutCandidate) -> float:
    """Return the model FLOP/s as a part of the devices' peak."""
    peak = plan.profile.peak_at(plan.precision) * plan.world_size
    return candidate.time.flops / candidate.time.total / peak


def _details(plan: Plan) -> Table:
    shown = plan.ranked[:SHOWN]
    axes = sorted({axis for each in shown for axis, traffic in each.time.traffic.items() if traffic.seconds})
    table = Table(
        box=None, pad_edge=False, padding=(0, 1), title_justify="left",
        title="\nGiB of the largest rank at its peak, and exposed (total) seconds of communication per step by axis",
    )  # fmt: skip
    table.add_column("#", justify="right")
    for name in (*KINDS, "moment", *axes):
        table.add_column(name, justify="right", overflow="fold")
    for number, each in enumerate(shown, 1):
        memory = [f"{getattr(each.memory, kind) / _GIB:.1f}" for kind in KINDS]
        waits = [_wait(each, axis) for axis in axes]
        table.add_row(str(number), *memory, each.memory.moment, *waits)
    return table


def _wait(candidate: LayoutCandidate, axis: str) -> str:
    traffic = candidate.time.traffic.get(axis)
    if traffic is None or not traffic.seconds:
        return "-"
    return f"{traffic.exposed:.2g} ({traffic.seconds:.2g})"


def reasons(refused: Sequence[Refusal]) -> list[str]:
    """Return why layouts are not possible, each reason with the layouts it holds for."""
    lines = []
    for kind, group in grouped(refused).items():
        shown = group[:_SHOWN_REASONS]
        lines += [f"{each.what}: {each.reason}" for each in shown]
        rest = len(group) - len(shown)
        if rest > 0:
            names = "; ".join(each.what for each in group[len(shown) : len(shown) + _SHOWN_NAMES])
            lines.append(f"... and {rest} more {_WHY[kind]}: {names}{'; ...' if rest > _SHOWN_NAMES else ''}")
    return lines


_WHY = {"layout": "refused for the module", "batch": "refused for the batch", "memory": "out of memory"}


def grouped(refused: Sequence[Refusal]) -> dict[str, list[Refusal]]:
    """Group refusals by kind: layouts, batches, memory; within a kind by missing memory."""
    by_memory = sorted(refused, key=lambda each: each.needed)
    found = {kind: [each for each in by_memory if each.kind == kind] for kind in _WHY}
    return {kind: group for kind, group in found.items() if group}


def as_dict(plan: Plan) -> dict[str, Any]:
    """Return plain values; bytes and seconds."""
    ranked = [candidate_as_dict(plan, each) for each in plan.ranked]
    return {
        "recipe": plan.name,
        "world_size": plan.world_size,
        "device": plan.profile.name,
        "device_source": plan.profile.source or f"device={plan.profile.name}",
        "usable_bytes": USABLE * plan.profile.memory_bytes,
        "precision": plan.precision,
        "parameters": plan.parameters,
        "global_batch_size": plan.global_batch_size,
        "seconds_of_planning": plan.seconds,
        "considered": plan.considered,
        "notes": list(plan.notes),
        "best": ranked[0] if ranked else None,
        "ranked": ranked,
        "refused": [
            {"what": each.what, "kind": each.kind, "reason": each.reason, "overrides": list(each.overrides)}
            for each in plan.refused
        ],
    }


def candidate_as_dict(plan: Plan, candidate: LayoutCandidate) -> dict[str, Any]:
    """Return plain values of one layout; bytes and seconds.

    `bytes_at_step` are those at the optimizer step, which a run can measure.
    """
    work, time, memory = candidate.work, candidate.time, candidate.memory
    return {
        "title": candidate.title,
        "extras": extras(candidate),
        "strategy": candidate.strategy,
        "layout": {**candidate.layout.sizes, "expert": candidate.layout.expert},
        "stage": work.stage,
        "schedule": work.schedule if work.has_pipeline else None,
        "stages_per_rank": work.stages_per_rank if work.has_pipeline else None,
        "micro_batches": work.parts if work.has_pipeline else None,
        "micro_batch_size": candidate.micro_batch_size,
        "accumulation": candidate.accumulation,
        "activation_checkpointing": candidate.cut.checkpointing,
        "offload": work.offload,
        "seconds": {
            "step": time.total,
            "compute": time.compute,
            "bubble": time.bubble,
            "optimizer": time.optimizer,
            "exposed": time.exposed,
        },
        "communication": {
            axis: {"bytes": each.bytes, "seconds": each.seconds, "exposed": each.exposed}
            for axis, each in time.traffic.items()
        },
        "samples_per_second": candidate.samples_per_second,
        "mfu": utilization(plan, candidate),
        "bytes": {
            **{kind: getattr(memory, kind) for kind in KINDS},
            "host": memory.host,
            "total": memory.total,
            "moment": memory.moment,
        },
        "bytes_at_step": {kind: getattr(candidate.at_step, kind) for kind in KINDS[:3]},
        "overrides": list(candidate.overrides),
    }
