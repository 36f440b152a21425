"""Which options of a layout go together, known before there is a module or a process.

Nothing here imports torch: a launcher reads it, and must start fast.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainwright.core.config.options import is_whole
from trainwright.core.layout import Layout
from trainwright.strategies.contract.communication.options import prefetch_of_nothing
from trainwright.strategies.parameter_server.tables.placement import placement_problems
from trainwright.strategies.pipeline.schedules import CHOICES, can_run, stages_per_rank_of

ATTENTION = ("ring", "ulysses", "gather")
PLAN_PARTS = ("blocks", "tensor", "heads", "whole_inputs", "first", "last", "experts")

# Option -> its default, the axis without which nothing reads it, and what it does.
_AXIS_OPTIONS: Mapping[str, tuple[Any, str, str]] = {
    "schedule": ("1f1b", "pipeline", "it orders the work of the stages of a pipeline"),
    "micro_batches": (None, "pipeline", "it splits a batch for the stages of a pipeline"),
    "stages_per_rank": (None, "pipeline", "it counts the stages of a pipeline"),
    "split": ("balanced", "pipeline", "it deals blocks out to the stages of a pipeline"),
    "batch_dims": ({}, "pipeline", "it says how a batch is split for the stages of a pipeline"),
    "sequence_parallel": (False, "tensor", "it splits activations over the tensor axis"),
    "loss_parallel": (False, "tensor", "it splits logits over the tensor axis"),
    "attention": ("ring", "context", "it says how ranks that split the sequence exchange keys and values"),
    "balance": (True, "context", "it says how the sequence is dealt out to ranks"),
}
_CUTTING_AXES = ("pipeline", "context", "tensor", "expert")


def cuts_module(layout: Layout) -> bool:
    """Whether ranks of ``layout`` hold different parts of the module along another axis than replicate and shard."""
    return any(getattr(layout, axis) != 1 for axis in _CUTTING_AXES)


def micro_batches_for(schedule: str, micro_batches: int | None, pipeline: int) -> int:
    """The number of micro-batches: as given, or for ``None`` one per pipeline rank, two for stages in a V."""
    is_vee = schedule in CHOICES and CHOICES[schedule].vee
    return micro_batches or pipeline * (2 if is_vee else 1)


def validate_hybrid(layout: Layout, options: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What is wrong with the options of a ``HybridStrategy``; empty if nothing is.

    An option at its default counts as not given. What depends on the size of an open axis (``-1``) is left out.

    Args:
        layout: the axes, open or closed.
        options: of the constructor by name, axes left out; missing ones are at their default.
        prefix: what stands before an option's name where it is typed (``"strategy."`` on the command line).

    Returns:
        One text per problem: what was given, what is allowed, what to type instead.
    """
    return [
        *_wrong_values(options, prefix),
        *_without_effect(layout, options, prefix),
        *_pipeline_problems(layout, options, prefix),
        *_state_problems(layout, options, prefix),
        *_plan_problems(layout, options, prefix),
        *placement_problems(layout, options, prefix),
    ]


def manual_optimization_problems(layout: Layout, options: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Why a module that optimizes by hand (``automatic_optimization = False``) cannot be trained; empty if it can."""
    if layout.pipeline != 1:
        return [
            "Manual optimization (automatic_optimization=False, which several optimizers need) has no meaning in a "
            "pipeline: forward and backward of micro-batches interleave, so training_step cannot call backward itself. "
            f"Use automatic optimization, or a layout with {prefix}pipeline=1"
        ]
    if layout.tensor != 1 and options.get("sequence_parallel"):
        return [
            "Manual optimization (automatic_optimization=False) with sequence_parallel is not supported: gradients of "
            "norms are completed once per step, which only the module knows when it ends. Type "
            f"{prefix}sequence_parallel=false"
        ]
    return []


def length_problems(layout: Layout, options: Mapping[str, Any], length: int, prefix: str = "") -> list[str]:
    """Why sequences of ``length`` positions cannot be cut; empty if they can.

    Args:
        layout: closed.
        options: see :func:`validate_hybrid`.
        length: positions that the blocks see in training.
        prefix: see :func:`validate_hybrid`.
    """
    chunks, what, remedy = layout.context, f"{prefix}context={layout.context}", ""
    if layout.context > 1 and options.get("balance", True):
        chunks *= 2
        remedy = f", or type {prefix}balance=false, which needs a multiple of {layout.context} only"
    if layout.tensor > 1 and options.get("sequence_parallel"):
        chunks = math.lcm(chunks, layout.context * layout.tensor)
        what = f"{what} and " if layout.context > 1 else ""
        what += f"{prefix}sequence_parallel=true on {prefix}tensor={layout.tensor}"
    if length % chunks == 0:
        return []
    near = max(chunks, length - length % chunks)
    return [f"a sequence of {length} positions with {what}: must be a multiple of {chunks}, such as {near}{remedy}"]


def averaging_problem(callback: str) -> str:
    """Why an averaging callback of Lightning cannot be used with experts that are spread over ranks.

    Args:
        callback: its class.
    """
    return (
        f"{callback} averages a copy of the module, in which experts would be sharded over other ranks than in the "
        "module itself. Leave it out, or use a layout with expert=1 (strategy=zero3, for one, shards the average too)"
    )


def sync_batchnorm_problem(layout: Layout) -> str | None:
    """Why statistics of BatchNorm over all ranks cannot be had under ``layout``; ``None`` if they can."""
    axes = [axis for axis in ("pipeline", "context", "tensor") if getattr(layout, axis) != 1]
    if not axes:
        return None
    given = " ".join(f"{axis}={getattr(layout, axis)}" for axis in axes)
    why = (
        "ranks of other stages do not run the same layer, so they would wait for each other for ever"
        if "pipeline" in axes
        else "its ranks work on the same samples, which would count several times"
    )
    return (
        f"sync_batchnorm=true with {given}: it takes statistics over all ranks, but {why}. Type "
        "trainer.sync_batchnorm=false (sync_batchnorm=False in Python), or use a norm that needs no other samples "
        "(LayerNorm, GroupNorm)"
    )


def optimizer_problem(layout: Layout, optimizer: str) -> str | None:
    """Why an optimizer cannot step a module that is cut by ``layout``, as far as its name tells; ``None``: nothing.

    All others are tried when they are built, see :mod:`~trainwright.strategies.data.optimizers.optimizer_probe`.

    Args:
        optimizer: name of its class.
    """
    axes = [f"{axis}={getattr(layout, axis)}" for axis in _CUTTING_AXES if getattr(layout, axis) != 1]
    if optimizer != "LBFGS" or not axes:
        return None
    return (
        f"LBFGS with {' '.join(axes)}: it computes the loss several times within a step, between which ranks would "
        "have to exchange parameters. Use an optimizer that computes it once (AdamW, SGD, Muon), or strategy=ddp"
    )


# ---- values -------------------------------------------------------------------------------------------------------


def _wrong_values(options: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for option, allowed in (("schedule", tuple(CHOICES)), ("attention", ATTENTION)):
        given = options.get(option, allowed[0])
        if given not in allowed:
            near = difflib.get_close_matches(str(given), allowed, n=1)
            question = f"did you mean {near[0]}? " if near else ""
            yield f"{prefix}{option}={given}: unknown; {question}allowed: {', '.join(allowed)}"
    for option in ("micro_batches", "stages_per_rank"):
        given = options.get(option)
        if given is not None and not is_whole(given, 1):
            yield f"{prefix}{option}={given}: must be a whole number of at least 1, or null for the default"
    split = options.get("split", "balanced")
    if split != "balanced" and not _is_split(split):
        yield (
            f"{prefix}split={split}: must be balanced, or the number of blocks of each stage, at least 1 each, such as "
            f"{prefix}split=[3,5]"
        )
    dims = options.get("batch_dims") or {}
    wrong = {path: dim for path, dim in dims.items() if isinstance(dim, bool) or not isinstance(dim, int | None)}
    if wrong:
        yield (
            f"{prefix}batch_dims={wrong}: each tensor's dim is a whole number, or null to give it whole to every "
            "micro-batch"
        )


def _is_split(split: object) -> bool:
    if not isinstance(split, Sequence) or isinstance(split, str):
        return False
    return len(split) > 0 and all(is_whole(each, 1) for each in split)


# ---- options that nothing would read ------------------------------------------------------------------------------


def _without_effect(layout: Layout, options: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for option, (default, axis, what) in _AXIS_OPTIONS.items():
        given = options.get(option, default)
        if given in (default, None) or getattr(layout, axis) != 1:
            continue
        if isinstance(default, dict) and not given:
            continue
        yield (
            f"{prefix}{option}={_typed(given)} with {axis}=1 has no effect: {what}. Leave it out, or type "
            f"{prefix}{axis}=2"
        )


def _typed(value: Any) -> str:
    """As it is typed on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)).replace(" ", "") if isinstance(value, (list, tuple)) else str(value)


# ---- pipeline -----------------------------------------------------------------------------------------------------


def _pipeline_problems(layout: Layout, options: Mapping[str, Any], prefix: str) -> Iterator[str]:
    schedule = options.get("schedule", "1f1b")
    per_rank, micro_batches, split = (options.get(name) for name in ("stages_per_rank", "micro_batches", "split"))
    if layout.pipeline == 1 or schedule not in CHOICES:
        return
    choice = CHOICES[schedule]
    if choice.splits_backward and options.get("compile"):
        yield (
            f"{prefix}schedule={schedule} with {prefix}compile=true: it computes gradients of inputs and of weights "
            f"apart, which compiled blocks cannot. Type {prefix}compile=false, or {prefix}schedule=interleaved_1f1b"
        )
    if is_whole(per_rank, 1) and choice.fixed and per_rank != choice.stages_per_rank:
        several = ", or choose one that takes several: " + ", ".join(n for n, c in CHOICES.items() if not c.fixed)
        yield (
            f"{prefix}stages_per_rank={per_rank} with {prefix}schedule={schedule}, which has exactly "
            f"{choice.stages_per_rank}; leave stages_per_rank out{several}"
        )
        return
    if layout.pipeline == -1 or not (per_rank is None or is_whole(per_rank, 1)):
        return
    stages = layout.pipeline * stages_per_rank_of(schedule, per_rank)
    if is_whole(micro_batches, 1) and not can_run(schedule, int(micro_batches or 1), layout.pipeline, stages):
        possible = [m for m in range(1, 4 * stages + 1) if can_run(schedule, m, layout.pipeline, stages)][:8]
        yield (
            f"{prefix}micro_batches={micro_batches} with {prefix}schedule={schedule} on {layout.pipeline} ranks with "
            f"{stages} stages: possible are {', '.join(map(str, possible))}, ...; type "
            f"{prefix}micro_batches={possible[-1]}"
        )
    if split not in (None, "balanced") and _is_split(split) and len(split) != stages:
        yield (
            f"{prefix}split={_typed(split)} names {len(split)} stages, but {layout.pipeline} ranks with "
            f"{stages // layout.pipeline} each make {stages}; give {stages} numbers, or leave split out"
        )


# ---- ZeRO ---------------------------------------------------------------------------------------------------------


def _state_problems(layout: Layout, options: Mapping[str, Any], prefix: str) -> Iterator[str]:
    stage = options.get("stage", 3)
    if options.get("find_unused_parameters") and stage == 3:
        yield (
            f"{prefix}find_unused_parameters=true with stage 3 has no effect: only stages 1 and 2 look for them. Type "
            f"{prefix}stage=2, or leave it out"
        )
    if stage == 3:
        yield from prefetch_of_nothing(options.get("prefetch"), layout, prefix)
    alone = layout.replicate == layout.shard == layout.context == 1
    if options.get("offload") == "parameters" and stage == 3 and alone and cuts_module(layout):
        yield (
            f"{prefix}offload=parameters with shard=1 and context=1 has no effect: it keeps the parts of parameters "
            f"that ranks of these axes gather. Type {prefix}offload=optimizer, or {prefix}shard=2"
        )


# ---- plan ---------------------------------------------------------------------------------------------------------


def _plan_problems(layout: Layout, options: Mapping[str, Any], prefix: str) -> Iterator[str]:
    plan = {part: value for part, value in (options.get("plan") or {}).items() if value is not None}
    for part in plan:
        if part not in PLAN_PARTS:
            near = difflib.get_close_matches(str(part), PLAN_PARTS, n=1)
            question = f"did you mean {near[0]}? " if near else ""
            yield f"{prefix}plan.{part}: a plan has no such part; {question}parts: {', '.join(PLAN_PARTS)}"
    if plan and not cuts_module(layout):
        yield (
            f"{prefix}plan with pipeline, context, tensor and expert all 1 has no effect: it says where the module may "
            f"be cut. Leave it out, or type {prefix}tensor=2"
        )
    if plan.get("blocks") is not None and options.get("blocks") is not None:
        yield f"{prefix}blocks and {prefix}plan.blocks are both given; leave one out, they mean the same"
