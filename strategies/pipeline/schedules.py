"""Pipeline schedules by name, their requirements, and the layout of blocks and stages.

Imports torch only when a schedule's class is loaded, so that a launcher can validate a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.core.torch_internals import _PipelineSchedule
    from trainwright.strategies.pipeline.stage import UserStepStage


@dataclass(frozen=True)
class PipelineSchedule:
    """Properties of a schedule.

    Attributes:
        torch_name: class name in ``torch.distributed.pipelining``.
        stages_per_rank: default number of stages per rank.
        fixed: whether no other number is possible.
        vee: whether stages go down the ranks and up again (``0 1 1 0``) instead of round (``0 1 0 1``).
        splits_backward: whether input and weight gradients are computed separately (zero bubble). Weight gradients then
            reach ``p.grad`` without autograd hooks, and blocks must not be compiled.
    """

    torch_name: str
    stages_per_rank: int = 1
    fixed: bool = False
    vee: bool = False
    splits_backward: bool = False

    def load(self) -> type[_PipelineSchedule]:
        """Load torch's class."""
        from torch.distributed.pipelining.schedules import get_schedule_class

        found: type[_PipelineSchedule] = get_schedule_class(self.torch_name)
        return found


# GPipe: arXiv 1811.06965; 1F1B and interleaved: 2104.04473; breadth first: 2211.05953; zero bubble: 2401.10241;
# DualPipeV: 2412.19437.
CHOICES: Mapping[str, PipelineSchedule] = {
    "gpipe": PipelineSchedule("GPipe", fixed=True),
    "1f1b": PipelineSchedule("1F1B", fixed=True),
    "interleaved_1f1b": PipelineSchedule("Interleaved1F1B", 2),
    "looped_bfs": PipelineSchedule("LoopedBFS", 2),
    "interleaved_zero_bubble": PipelineSchedule("InterleavedZeroBubble", 2, splits_backward=True),
    "zbv": PipelineSchedule("ZBVZeroBubble", 2, fixed=True, vee=True, splits_backward=True),
    "dualpipev": PipelineSchedule("DualPipeV", 2, fixed=True, vee=True, splits_backward=True),
}


def stages_per_rank_of(schedule: str, stages_per_rank: int | None) -> int:
    """Return the number of stages per rank; default: that of the schedule."""
    return CHOICES[schedule].stages_per_rank if stages_per_rank is None else stages_per_rank


def block_problems(
    num_blocks: int,
    pipeline: int,
    schedule: str,
    stages_per_rank: int | None = None,
    split: Sequence[int] | None = None,
) -> list[str]:
    """Return why blocks cannot be assigned to the stages of a pipeline, with possible values.

    Args:
        num_blocks: repeated blocks of the model.
        pipeline: size of the mesh axis.
        schedule: a key of :data:`CHOICES`.
        stages_per_rank: ``None``: the schedule's default.
        split: number of blocks of each stage; ``None``: balanced.
    """
    per_rank = stages_per_rank_of(schedule, stages_per_rank)
    stages = pipeline * per_rank
    if num_blocks < stages:
        fixed = CHOICES[schedule].fixed
        return [
            f"{num_blocks} blocks cannot be assigned to {stages} stages ({pipeline} ranks x {per_rank} stages): each "
            f"needs a block. Set pipeline to at most {num_blocks // per_rank or 1}"
            + ("." if fixed else f", or stages_per_rank to at most {max(1, num_blocks // pipeline)}.")
        ]
    if split is None or (len(split) == stages and sum(split) == num_blocks and min(split) >= 1):
        return []
    example = [len(span) for span in split_blocks([1.0] * num_blocks, stages)]
    return [
        f"split={list(split)} must give each of the {stages} stages at least one block, {num_blocks} in all, for "
        f"example {example}."
    ]


def can_run(schedule: str, micro_batches: int, ranks: int, stages: int) -> bool:
    """Return whether torch's schedule supports this number of micro-batches."""
    if micro_batches < 1:
        return False
    if schedule in ("1f1b", "dualpipev"):
        return micro_batches >= stages
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        return micro_batches % max(1, micro_batches // ranks) == 0
    return True


def split_blocks(weights: Sequence[float], stages: int) -> list[range]:
    """Split blocks into contiguous spans, one per stage, minimizing the heaviest stage.

    Ties are broken by the smallest sum of squares.

    Args:
        weights: cost of each block, in any unit.
        stages: number of spans; each gets at least one block.

    Raises:
        ValueError: if there are fewer blocks than stages.
    """
    if not 1 <= stages <= len(weights):
        raise ValueError(f"{len(weights)} blocks cannot be split into {stages} stages. Use 1 to {len(weights)} stages.")
    heaviest = _best(weights, stages, max, lambda span: span)[0]
    limit = heaviest + 1e-9 * abs(heaviest)
    squares = _best(weights, stages, lambda a, b: a + b, lambda span: span * span if span <= limit else float("inf"))
    bounds = [*squares[1], len(weights)]
    return [range(lo, hi) for lo, hi in zip(bounds[:-1], bounds[1:], strict=True)]


def _best(
    weights: Sequence[float], stages: int, join: Callable[[float, float], float], cost: Callable[[float], float]
) -> tuple[float, list[int]]:
    """Return the cost of the best split, by dynamic programming, and the start of each stage."""
    sums = [0.0, *accumulate(weights)]
    ends = range(1, len(sums))
    table = {end: (cost(sums[end]), [0]) for end in ends}
    for _ in range(1, stages):
        table = {
            end: min(
                ((join(table[at][0], cost(sums[end] - sums[at])), [*table[at][1], at]) for at in table if at < end),
                key=lambda each: each[0],
            )
            for end in ends
            if end > min(table)
        }
    return table[len(weights)]


def stages_of_rank(rank: int, ranks: int, stages: int, schedule: str) -> list[int]:
    """Return the stages of a rank of the pipeline, ascending."""
    return [stage for stage, holder in enumerate(ranks_of_stages(ranks, stages, schedule)) if holder == rank]


def ranks_of_stages(ranks: int, stages: int, schedule: str) -> list[int]:
    """Return the rank in the pipeline of each stage."""
    down = range(ranks)
    if CHOICES[schedule].vee:
        return [*down, *reversed(down)]
    return [stage % ranks for stage in range(stages)]


def orders_of(schedule: Any) -> dict[int, list[tuple[str, int, int]]] | None:
    """Return each rank's actions in torch's schedule, in order: kind, stage and micro-batch.

    ``None`` for single-stage schedules, which order their communication internally.
    """
    orders = getattr(schedule, "pipeline_order_with_comms", None)
    if orders is None:
        return None
    return {
        rank: [(each.computation_type.value, each.stage_index, each.microbatch_index) for each in order]
        for rank, order in orders.items()
    }


def make_schedule(
    name: str,
    stages: list[UserStepStage],
    micro_batches: int,
    loss_fn: Callable[[Any, Any], Any],
    *,
    drains: bool = False,
) -> Any:
    """Create torch's schedule for ``micro_batches``.

    If it does not support the number (a short last batch), all forwards are followed by all backwards, with the same
    result.

    Args:
        name: a key of :data:`CHOICES`.
        stages: this rank's stages, ascending.
        micro_batches: how many.
        loss_fn: see torch.
        drains: whether all forwards come before all backwards.
    """
    ranks, count = stages[0].group_size, stages[0].num_stages
    possible = not drains and can_run(name, micro_batches, ranks, count)
    if name in ("gpipe", "1f1b"):
        single: Any = CHOICES[name if possible else "gpipe"].load()
        return single(stages[0], n_microbatches=micro_batches, loss_fn=loss_fn, scale_grads=False)
    if not possible:
        return _fill_and_drain(name, stages, micro_batches, loss_fn)
    several: Any = CHOICES[name].load()
    return _one_by_one(several(stages, n_microbatches=micro_batches, loss_fn=loss_fn, scale_grads=False))


def _one_by_one(schedule: Any) -> Any:
    """Let a forward and a backward that torch pairs (DualPipeV) send their results separately.

    Without a kernel that overlaps them, they run sequentially, and sending both at the end delays the next rank.
    """
    orders: dict[int, list[Any]] = schedule.pipeline_order
    if any(action and action.sub_actions for order in orders.values() for action in order):
        schedule.pipeline_order = {
            rank: [each for action in order for each in ((action and action.sub_actions) or (action,))]
            for rank, order in orders.items()
        }
        schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    return schedule


def _fill_and_drain(
    name: str, stages: list[UserStepStage], micro_batches: int, loss_fn: Callable[[Any, Any], Any]
) -> Any:
    from trainwright.core.torch_internals import _Action, _ComputationType, _PipelineScheduleRuntime

    ranks, count = stages[0].group_size, stages[0].num_stages
    runtime: Any = _PipelineScheduleRuntime
    schedule = runtime(stages, n_microbatches=micro_batches, loss_fn=loss_fn, scale_grads=False)
    orders: dict[int, list[Any]] = {}
    for rank in range(ranks):
        mine = stages_of_rank(rank, ranks, count, name)
        orders[rank] = [
            _Action(stage, kind, part)
            for kind, order in (
                (_ComputationType.FORWARD, mine),
                (_ComputationType.FULL_BACKWARD, list(reversed(mine))),
            )
            for stage in order
            for part in range(micro_batches)
        ]
    schedule.pipeline_order = orders
    schedule._prepare_schedule_with_comms(orders)
    return schedule
