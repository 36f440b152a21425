"""The schedules of a pipeline by name, what each asks for, and how blocks and stages are laid out.

Nothing here imports torch before a schedule's class is asked for, so that a launcher can validate a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.core.torch_internals import _PipelineSchedule
    from trainwright.strategies.pipeline.stage import OwnForwardStage


@dataclass(frozen=True)
class PipelineSchedule:
    """What one schedule is like.

    Attributes:
        torch_name: name of its class in ``torch.distributed.pipelining``.
        stages_per_rank: default number of stages of a rank.
        fixed: whether that number is the only one possible.
        vee: whether stages go down the ranks and up again (``0 1 1 0``) instead of round (``0 1 0 1``).
        splits_backward: whether gradients of inputs and of weights are computed apart (zero bubble). Gradients of
            weights then reach ``p.grad`` without hooks of autograd, and blocks must not be compiled.
    """

    torch_name: str
    stages_per_rank: int = 1
    fixed: bool = False
    vee: bool = False
    splits_backward: bool = False

    def load(self) -> type[_PipelineSchedule]:
        """Torch's class."""
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
    """The number of stages of a rank: as given, or the schedule's default for ``None``."""
    return CHOICES[schedule].stages_per_rank if stages_per_rank is None else stages_per_rank


def validate_pipeline(
    num_blocks: int,
    pipeline: int,
    schedule: str,
    micro_batches: int,
    stages_per_rank: int | None = None,
    split: Sequence[int] | None = None,
) -> list[str]:
    """What is wrong with a pipeline's configuration, with the values that are possible; empty if nothing is.

    Args:
        num_blocks: repeated blocks of the model.
        pipeline: size of the mesh axis.
        schedule: a key of :data:`CHOICES`.
        micro_batches: parts of a rank's batch.
        stages_per_rank: stages of a rank; ``None`` is the schedule's default.
        split: number of blocks of each stage; ``None`` balances them.
    """
    if schedule not in CHOICES:
        return [f"schedule={schedule!r} does not exist. Choose one of: {', '.join(CHOICES)}."]
    problems = []
    choice = CHOICES[schedule]
    per_rank = stages_per_rank_of(schedule, stages_per_rank)
    if per_rank < 1 or (choice.fixed and per_rank != choice.stages_per_rank):
        allowed = f"exactly {choice.stages_per_rank}" if choice.fixed else "1 or more"
        return [f"stages_per_rank={per_rank} does not go with schedule={schedule!r}, which takes {allowed}."]
    stages = pipeline * per_rank
    if num_blocks < stages:
        problems.append(
            f"{num_blocks} blocks cannot be dealt out to {stages} stages ({pipeline} ranks x {per_rank} stages): "
            f"each needs a block. Set pipeline to at most {num_blocks // per_rank or 1}"
            + ("." if choice.fixed else f", or stages_per_rank to at most {max(1, num_blocks // pipeline)}.")
        )
    if not can_run(schedule, micro_batches, pipeline, stages):
        possible = [m for m in range(1, 4 * stages + 1) if can_run(schedule, m, pipeline, stages)][:8]
        problems.append(
            f"micro_batches={micro_batches} does not go with schedule={schedule!r} on {pipeline} ranks with {stages} "
            f"stages. Possible are: {', '.join(map(str, possible))}, ..."
        )
    return problems + ([] if split is None else _validate_split(split, num_blocks, stages))


def _validate_split(split: Sequence[int], num_blocks: int, stages: int) -> list[str]:
    if len(split) == stages and sum(split) == num_blocks and min(split) >= 1:
        return []
    example = [len(span) for span in split_blocks([1.0] * num_blocks, stages)] if num_blocks >= stages else None
    return [
        f"split={list(split)} must give each of the {stages} stages at least one block, {num_blocks} in all"
        + (f", for example {example}." if example else ".")
    ]


def can_run(schedule: str, micro_batches: int, ranks: int, stages: int) -> bool:
    """Whether torch's schedule takes this number of micro-batches."""
    if micro_batches < 1:
        return False
    if schedule in ("1f1b", "dualpipev"):
        return micro_batches >= stages
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        return micro_batches % max(1, micro_batches // ranks) == 0
    return True


def split_blocks(weights: Sequence[float], stages: int) -> list[range]:
    """Contiguous spans of blocks, one per stage, such that the heaviest stage is as light as can be.

    Among those, the one whose stages differ least is taken (the smallest sum of squares).

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
    """The cheapest cut by dynamic programming: its cost and where each stage begins."""
    count = len(weights)
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    table = [cost(sums[end]) for end in range(count + 1)]
    choices: list[list[int]] = []
    for stage in range(1, stages):
        following, chosen = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(stage + 1, count + 1):
            for at in range(stage, end):
                total = join(table[at], cost(sums[end] - sums[at]))
                if total < following[end]:
                    following[end], chosen[end] = total, at
        table = following
        choices.append(chosen)
    starts, end = [], count
    for chosen in reversed(choices):
        end = chosen[end]
        starts.append(end)
    return table[count], [0, *reversed(starts)]


def stages_of_rank(rank: int, ranks: int, stages: int, schedule: str) -> list[int]:
    """Stages that a rank of the pipeline runs, ascending."""
    return [stage for stage, holder in enumerate(ranks_of_stages(ranks, stages, schedule)) if holder == rank]


def ranks_of_stages(ranks: int, stages: int, schedule: str) -> list[int]:
    """The rank in the pipeline of each stage."""
    down = range(ranks)
    if CHOICES[schedule].vee:
        return [*down, *reversed(down)]
    return [stage % ranks for stage in range(stages)]


def orders_of(schedule: Any) -> dict[int, list[tuple[str, int, int]]] | None:
    """What every rank does in a step of torch's schedule: kind, stage and micro-batch of each action, in order.

    ``None``: it is one of those for a single stage of each rank, which send and wait in an order of their own.
    """
    orders = getattr(schedule, "pipeline_order_with_comms", None)
    if orders is None:
        return None
    return {
        rank: [(each.computation_type.value, each.stage_index, each.microbatch_index) for each in order]
        for rank, order in orders.items()
    }


def make_schedule(
    name: str, stages: list[OwnForwardStage], micro_batches: int, loss_fn: Callable[[Any, Any], Any]
) -> Any:
    """Torch's schedule for this number of micro-batches.

    One that cannot take it (a short last batch) is replaced by a plain order for this number, all forwards and then all
    backwards, which computes the same.

    Args:
        name: a key of :data:`CHOICES`.
        stages: this rank's stages, ascending.
        micro_batches: how many.
        loss_fn: see torch.
    """
    ranks, count = stages[0].group_size, stages[0].num_stages
    possible = can_run(name, micro_batches, ranks, count)
    if name in ("gpipe", "1f1b"):
        single: Any = CHOICES[name if possible else "gpipe"].load()
        return single(stages[0], n_microbatches=micro_batches, loss_fn=loss_fn, scale_grads=False)
    if not possible:
        return _fill_and_drain(name, stages, micro_batches, loss_fn)
    several: Any = CHOICES[name].load()
    return _one_by_one(several(stages, n_microbatches=micro_batches, loss_fn=loss_fn, scale_grads=False))


def _one_by_one(schedule: Any) -> Any:
    """Let a forward and a backward that torch pairs (DualPipeV) send what they give each at once.

    Without a kernel that overlaps the two, they run one after the other anyway; sending both results after both only
    made the next rank wait.
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
    name: str, stages: list[OwnForwardStage], micro_batches: int, loss_fn: Callable[[Any, Any], Any]
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
