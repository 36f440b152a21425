"""Restrictions of layouts that partition the module, without torch, for launchers."""

from __future__ import annotations

import math

from trainwright.core.layout import Layout
from trainwright.strategies.pipeline.schedules import CHOICES

PLAN_PARTS = ("blocks", "tensor", "heads", "whole_inputs", "first", "last", "experts")
_CUTTING_AXES = ("pipeline", "context", "tensor", "expert")


def cuts_module(layout: Layout) -> bool:
    """Return whether ``layout`` partitions the module along other axes than replicate and shard."""
    return any(getattr(layout, axis) != 1 for axis in _CUTTING_AXES)


def micro_batches_for(schedule: str, micro_batches: int | None, pipeline: int) -> int:
    """Return the number of micro-batches; default: one per pipeline rank, two for V-shaped schedules."""
    is_vee = schedule in CHOICES and CHOICES[schedule].vee
    return micro_batches or pipeline * (2 if is_vee else 1)


def manual_optimization_problems(layout: Layout, sequence_parallel: bool) -> list[str]:
    """Return why manual optimization (``automatic_optimization = False``) is not supported."""
    if layout.pipeline != 1:
        return [
            "Manual optimization (automatic_optimization=False, which several optimizers need) is not supported by a "
            "pipeline: forward and backward of micro-batches interleave, so training_step cannot call backward itself. "
            "Use automatic optimization, or a layout with strategy.pipeline=1"
        ]
    if layout.tensor != 1 and sequence_parallel:
        return [
            "Manual optimization (automatic_optimization=False) with sequence_parallel is not supported: gradients of "
            "norms are completed once per step, which only the module knows when it ends. Type "
            "strategy.sequence_parallel=false"
        ]
    return []


def length_problems(layout: Layout, length: int, *, balance: bool = True, sequence_parallel: bool = False) -> list[str]:
    """Return why sequences of ``length`` positions cannot be split.

    Args:
        layout: closed.
        length: positions in training.
        balance: whether each context rank gets two parts of the sequence.
        sequence_parallel: whether tensor ranks split it, too.
    """
    chunks, what, remedy = layout.context, f"strategy.context={layout.context}", ""
    if layout.context > 1 and balance:
        chunks *= 2
        remedy = f", or type strategy.balance=false, which needs a multiple of {layout.context} only"
    if layout.tensor > 1 and sequence_parallel:
        chunks = math.lcm(chunks, layout.context * layout.tensor)
        what = f"{what} and " if layout.context > 1 else ""
        what += f"strategy.sequence_parallel=true on strategy.tensor={layout.tensor}"
    if length % chunks == 0:
        return []
    near = max(chunks, length - length % chunks)
    return [f"a sequence of {length} positions with {what}: must be a multiple of {chunks}, such as {near}{remedy}"]


def averaging_problem(callback: str) -> str:
    """Return the error of a Lightning averaging callback with expert parallelism.

    Args:
        callback: its class name.
    """
    return (
        f"{callback} averages a copy of the module, in which experts would be sharded over other ranks than in the "
        "module itself. Leave it out, or use a layout with expert=1 (strategy=zero3, for one, shards the average too)"
    )


def sync_batchnorm_problem(layout: Layout) -> list[str]:
    """Return why synchronized BatchNorm is not supported under ``layout``."""
    axes = [axis for axis in ("pipeline", "context", "tensor") if getattr(layout, axis) != 1]
    if not axes:
        return []
    given = " ".join(f"{axis}={getattr(layout, axis)}" for axis in axes)
    why = (
        "ranks of other stages do not run the same layer, so they would deadlock"
        if "pipeline" in axes
        else "its ranks work on the same samples, which would count several times"
    )
    return [
        f"sync_batchnorm=true with {given}: it takes statistics over all ranks, but {why}. Type "
        "trainer.sync_batchnorm=false (sync_batchnorm=False in Python), or use a norm that needs no other samples "
        "(LayerNorm, GroupNorm)"
    ]


def optimizer_problem(layout: Layout, optimizer: str) -> list[str]:
    """Return why an optimizer cannot step a module partitioned by ``layout``, as far as its name tells.

    Others are tried when they are built, see :mod:`~trainwright.strategies.base.optimizer_probe`.

    Args:
        layout: of the run.
        optimizer: class name.
    """
    axes = [f"{axis}={getattr(layout, axis)}" for axis in _CUTTING_AXES if getattr(layout, axis) != 1]
    if optimizer != "LBFGS" or not axes:
        return []
    return [
        f"LBFGS with {' '.join(axes)}: it computes the loss several times within a step, between which ranks would "
        "have to exchange parameters. Use an optimizer that computes it once (AdamW, SGD, Muon), or strategy=ddp"
    ]
