"""Search for possible layouts, their memory and step time.

Axes are enumerated as divisors of the world size. Each axis is checked against the module by the checks of a run, once
for all layouts that share it, with the same messages. For each layout the fastest execution that fits is found
(micro-batches, schedules, activation checkpointing, offloading).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from omegaconf import DictConfig

from trainwright.core.config.missing import resolved
from trainwright.core.config.options import class_of
from trainwright.core.global_batch import solve_accumulation
from trainwright.core.layout import Layout
from trainwright.core.problems import ConfigError
from trainwright.planning.memory.peak import Held
from trainwright.planning.model.experts import Routing
from trainwright.planning.model.fake_run import FactsError
from trainwright.planning.search.limits import Limits
from trainwright.planning.search.overrides import overrides_of, overrides_of_axes, overrides_of_layout
from trainwright.planning.search.plan import LayoutCandidate, Plan, Refusals, describe, describe_data, too_large
from trainwright.planning.search.planned_config import PlannedConfig
from trainwright.planning.search.sizes import divisors_of, micro_batches_of, shards_of, strategies_for
from trainwright.planning.search.work import Work
from trainwright.planning.time.cost import ModelCut
from trainwright.strategies.compose.check_strategy import too_few_samples
from trainwright.strategies.compose.engine_options import EngineOptions
from trainwright.strategies.compose.engines import problems_of
from trainwright.strategies.compose.hybrid_options import sequence_length
from trainwright.strategies.compose.model_plan import plan_for
from trainwright.strategies.compose.rules import (
    cuts_module,
    length_problems,
    manual_optimization_problems,
    optimizer_problem,
)
from trainwright.strategies.data.options import OFFLOADS
from trainwright.strategies.pipeline.schedules import can_run
from trainwright.strategies.plan.model_plan import ModelPlan

_MOST_IN_PIPELINE = 3


class ExecutionSearch:
    """Search for the fastest execution of a layout that fits; records a refusal if none does.

    Args:
        config: the configuration.
        limits: fixed choices.
        refusals: extended by this object.

    Attributes:
        considered: number of executions evaluated.
    """

    def __init__(self, config: PlannedConfig, limits: Limits, refusals: Refusals) -> None:
        self._config, self._limits, self._refusals = config, limits, refusals
        self.considered = 0

    def fastest(
        self, strategy: str, stage: int, layout: Layout, cut: ModelCut, samples: int | None
    ) -> LayoutCandidate | None:
        """Return the fastest execution, with or without checkpointing; offloaded only if nothing else fits.

        Args:
            strategy: name.
            stage: of ZeRO; 0: none.
            layout: closed.
            cut: of a pass, except for checkpointing.
            samples: of a data rank per step; ``None``: chosen.
        """
        least: Held | None = None
        for offload in self._limits.allowed("offload", OFFLOADS):
            splits = stage == 3 and layout.state_ranks > 1
            if offload != "none" and (stage == 0 or (offload == "parameters" and not splits)):
                continue
            fitting = []
            ways = ("none", "full") if self._config.facts.blocks else ("none",)
            for checkpointing in self._limits.allowed("activation_checkpointing", ways):
                way = replace(cut, checkpointing=checkpointing)
                try:
                    cost = self._config.facts.approximate(way)
                except FactsError:
                    continue
                for works in self._works(stage, layout, samples, offload):
                    for work in works:
                        self.considered += 1
                        held = self._config.held(work, cost)
                        if least is None or held.total < least.total:
                            least = held
                        if self._config.fits(held):
                            fitting.append(self._config.candidate(strategy, work, way, cost, held))
                            break  # the first one that fits is the fastest
            if fitting:
                return min(fitting, key=lambda each: each.time.total / each.samples)
        if least is not None:
            reason = too_large(least, self._config.capacity, self._config.profile)
            overrides = overrides_of_layout(strategy, layout, stage)
            self._refusals.add(describe(strategy, layout, stage), "memory", reason, overrides, least.total)
        return None

    def _works(self, stage: int, layout: Layout, samples: int | None, offload: str) -> Iterator[Iterator[Work]]:
        """Yield groups of executions of a layout, each in order of speed."""
        asked = self._limits.micro_batch_size
        reads = asked or samples  # samples of a data rank per round
        if reads is not None and samples is not None and samples % reads:
            return
        if layout.pipeline > 1:
            rounds = 1 if samples is None or reads is None else samples // reads
            for work in self._works_of_pipeline(stage, layout, reads, rounds, offload):
                yield filter(self._limits.allow_work, [work])
            return
        sizes = micro_batches_of(reads) if asked is None else [asked]
        # Large micro-batches gather parameters less often.
        works = (
            Work(layout, stage, micro_batch=size, rounds=1 if samples is None else samples // size, offload=offload)
            for size in sizes
        )
        yield filter(self._limits.allow_work, works)

    def _works_of_pipeline(
        self, stage: int, layout: Layout, reads: int | None, rounds: int, offload: str
    ) -> Iterator[Work]:
        if reads is not None and reads < layout.pipeline:
            self._refuse_few(layout, stage, reads)
        for schedule, per_rank in self._schedules(layout.pipeline):
            # More micro-batches shrink the bubble and need less memory each.
            for size in self._sizes_in_pipeline(reads):
                parts = 4 * layout.pipeline if reads is None else reads // size
                stages = layout.pipeline * per_rank
                if parts >= layout.pipeline and can_run(schedule, parts, layout.pipeline, stages):
                    yield Work(layout, stage, size, rounds, parts, schedule, per_rank, offload)

    def _sizes_in_pipeline(self, reads: int | None) -> Sequence[int]:
        parts = self._limits.micro_batches
        if parts is not None and reads is not None:
            return [reads // parts] if reads % parts == 0 else []
        return sorted(micro_batches_of(reads))[:_MOST_IN_PIPELINE]

    def _schedules(self, pipeline: int) -> list[tuple[str, int]]:
        """Return schedules and stages per rank; the most interleaved first, since it idles least."""
        blocks = len(self._config.facts.blocks)
        several = [v for v in (8, 6, 5, 4, 3, 2) if pipeline * v <= blocks and (blocks % (pipeline * v) == 0 or v == 2)]
        return [*(("interleaved_1f1b", v) for v in several[:3]), ("1f1b", 1)]

    def _refuse_few(self, layout: Layout, stage: int, samples: int) -> None:
        overrides = (*overrides_of_layout("hybrid", layout, stage), f"micro_batch_size={samples}")
        reason = too_few_samples(samples, layout.pipeline, default_of="1f1b")
        self._refusals.add(describe_data(layout), "batch", reason, overrides)


_GIB = 2**30
# Assumed tokens at the busiest rank, relative to even routing.
_UNEVEN = 1.25


def plan(cfg: DictConfig, limits: Limits | None = None) -> Plan:
    """Rank all layouts of a configuration by predicted step time.

    Args:
        cfg: as returned by ``trainwright.compose``. Used are the model options of ``strategy`` (``plan``, ``blocks``,
            ``batch_dims``) and ``devices`` times ``nodes``; this machine need not have them.
        limits: fixed choices; None: none.

    Raises:
        ConfigError: if the module cannot be built or run without memory, or the device profile is unknown.
    """
    began = time.monotonic()
    found = _Search(PlannedConfig(resolved(cfg)), limits or Limits()).run()
    return replace(found, seconds=time.monotonic() - began)


class _Search:
    """Search through all layouts of a configuration."""

    def __init__(self, config: PlannedConfig, limits: Limits) -> None:
        self._config, self._limits = config, limits
        self._refusals = Refusals()
        self._axes = Axes(config, limits, self._refusals)
        self._executions = ExecutionSearch(config, limits, self._refusals)

    def run(self) -> Plan:
        """Return the plan without its duration."""
        best: dict[tuple[Any, ...], LayoutCandidate] = {}
        for candidate in self._candidates():
            key = (candidate.strategy, candidate.layout, candidate.work.stage)
            known = best.get(key)
            if known is None or candidate.samples_per_second > known.samples_per_second:
                best[key] = candidate
        ranked = sorted(best.values(), key=lambda each: -each.samples_per_second)
        ranked = [replace(each, overrides=overrides_of(self._config, each)) for each in ranked]
        return self._config.result(
            ranked,
            refused=self._refusals.excluding({each.title for each in ranked}),
            notes=tuple(self._notes(ranked[0])) if ranked else (),
            considered=self._executions.considered,
        )

    def _candidates(self) -> Iterator[LayoutCandidate]:
        world = self._config.world_size
        for tensor in self._axes.tensors():
            sequence = self._axes.splits_sequence(tensor)
            for context in self._axes.contexts(world // tensor, tensor, sequence):
                cut = self._axes.cut(tensor, context, sequence)
                if cut is None:
                    continue
                for pipeline in self._axes.pipelines(world // (tensor * context)):
                    yield from self._with_data(cut, pipeline, world // (tensor * context * pipeline))

    def _with_data(self, cut: ModelCut, pipeline: int, data: int) -> Iterator[LayoutCandidate]:
        """Yield candidates with ``data`` ranks on the data axes."""
        whole = Layout(pipeline=pipeline, replicate=data, context=cut.context, tensor=cut.tensor)
        batch = self._config.cfg.global_batch_size
        if batch is not None and batch % data:
            self._refuse_batch(whole, batch)
            return
        for shard in self._shards(whole):
            split = replace(whole, replicate=data // shard, shard=shard)
            for expert in self._axes.experts(split):
                layout, way = replace(split, expert=expert), replace(cut, expert=expert)
                for strategy, stage in strategies_for(layout):
                    if self._limits.allow_layout(layout, stage):
                        samples = None if batch is None else batch // data
                        found = self._executions.fastest(strategy, stage, layout, way, samples)
                        yield from [found] if found is not None else []

    def _shards(self, layout: Layout) -> list[int]:
        """Return sizes of the shard axis among the data ranks of a layout, including a fixed one."""
        data, axes = layout.data_ranks, self._limits.axes
        node = max(self._config.profile.devices_per_node // (layout.tensor * layout.context), 1)
        given = axes.get("shard") or data // axes.get("replicate", data)
        return sorted({*shards_of(data, node), *([given] if given and data % given == 0 else [])})

    def _refuse_batch(self, layout: Layout, batch: int) -> None:
        """Refuse a batch that the data ranks cannot share, with the message of a run."""
        strategy = "hybrid" if cuts_module(layout) else "ddp"
        try:
            solve_accumulation(batch, 1, layout.data_ranks)
        except ValueError as error:
            overrides = (*overrides_of_layout(strategy, layout, 1), "micro_batch_size=1")
            self._refusals.add(describe_data(layout), "batch", str(error), overrides)

    def _notes(self, best: LayoutCandidate) -> Iterator[str]:
        """Yield the plan's assumptions."""
        if best.layout.expert == 1:
            return
        more = replace(best.cut, routing=Routing(received=_UNEVEN, computed=_UNEVEN))
        even, uneven = (
            self._config.held(best.work, self._config.facts.approximate(cut)).total for cut in (best.cut, more)
        )
        yield (
            "even routing of tokens to experts is assumed; a rank that receives "
            f"{100 * (_UNEVEN - 1):.0f} % more than the mean needs {max(uneven - even, 0) / _GIB:.2f} GiB "
            "more in the first layout (a run logs rank_imbalance)"
        )


# Least positions per rank of a context axis of more than two ranks.
_POSITIONS = 2048
_PREFIX = "strategy."


class Axes:
    """Possible sizes of axes; records refusals of others.

    Args:
        config: the configuration.
        limits: fixed choices.
        refusals: extended by this object.
    """

    def __init__(self, config: PlannedConfig, limits: Limits, refusals: Refusals) -> None:
        self._config, self._limits, self._refusals = config, limits, refusals
        self._length = sequence_length(config.cfg)
        optimizer = config.cfg.optimizer
        self._optimizers = [class_of(optimizer)] if isinstance(optimizer, DictConfig) else []
        self._problems = cache(self._problems_of)
        self._allows_expert = cache(self._check_expert)

    def tensors(self) -> Iterator[int]:
        """Yield sizes of the tensor axis; within a node, unless fixed."""
        world, given = self._config.world_size, self._limits.axes.get("tensor")
        node = max(self._config.profile.devices_per_node, 1)
        sizes = [given] if given and world % given == 0 else [t for t in divisors_of(world) if t <= node]
        for tensor in sizes:
            if tensor == 1 or not self._refused(self._problems(Layout(tensor=tensor)), tensor=tensor):
                yield tensor

    def splits_sequence(self, tensor: int) -> bool:
        """Return whether a tensor axis of this size can split activations along the sequence."""
        if tensor == 1 or self._limits.sequence_parallel is False:
            return False
        return not self._problems(Layout(tensor=tensor), sequence_parallel=True)

    def contexts(self, rest: int, tensor: int, sequence: bool) -> Iterator[int]:
        """Yield sizes of the context axis.

        Args:
            rest: ranks besides the tensor axis.
            tensor: size of the tensor axis.
            sequence: whether it splits activations along the sequence.
        """
        most = self._limits.axes.get("context") or max(2, (self._length or 0) // _POSITIONS)
        for context in divisors_of(rest):
            if not self._limits.allow_axis("context", context):
                continue
            if context == 1:
                yield context
                continue
            if context > most:
                return
            problems = list(self._problems(Layout(context=context)))
            if self._length is not None and sequence:
                both = Layout(context=context, tensor=tensor)
                problems += length_problems(both, self._length, sequence_parallel=True)
            if not self._refused(problems, context=context):
                yield context

    def pipelines(self, rest: int) -> Iterator[int]:
        """Yield sizes of the pipeline axis.

        Args:
            rest: ranks besides the tensor and the context axis.
        """
        for pipeline in divisors_of(rest):
            if not self._limits.allow_axis("pipeline", pipeline):
                continue
            if pipeline == 1 or not self._refused(self._problems(Layout(pipeline=pipeline)), pipeline=pipeline):
                yield pipeline
            elif pipeline > max(len(self._config.facts.blocks), 1):
                return

    def experts(self, layout: Layout) -> Iterator[int]:
        """Yield sizes of the expert axis within a closed layout."""
        yield 1
        if not self._config.plan_of(1).experts:
            return
        for expert in divisors_of(layout.state_ranks)[1:]:
            if self._limits.allow_axis("expert", expert) and self._allows_expert(expert):
                yield expert

    def cut(self, tensor: int, context: int, sequence: bool) -> ModelCut | None:
        """Return the cut of a pass; None if the module cannot be run with it.

        Args:
            tensor, context: sizes of these axes.
            sequence: whether the tensor axis splits activations along the sequence.

        Raises:
            ConfigError: if the module does not even run whole.
        """
        cut = ModelCut(tensor=tensor, context=context, sequence_parallel=sequence, attention=self._config.attention)
        ways = [cut]
        may_split_loss = tensor > 1 and context == 1 and self._limits.loss_parallel is not False
        if may_split_loss and not self._problems(Layout(tensor=tensor), loss_parallel=True):
            ways.insert(0, replace(cut, loss_parallel=True))
        problem = ""
        for way in ways:
            try:
                self._config.facts.approximate(way)
            except FactsError as error:
                problem = str(error)
            else:
                return way
        if tensor * context == 1:
            raise ConfigError([problem])
        what = describe("hybrid", Layout(tensor=tensor, context=context), 1)
        self._refusals.add(what, "layout", problem, overrides_of_axes(tensor=tensor, context=context))
        return None

    def _refused(self, problems: list[str], **sizes: int) -> bool:
        """Record the first problem as refusal of an axis of this size, and return whether there are any."""
        for problem in problems[:1]:
            what = " ".join(f"{axis} {size}" for axis, size in sizes.items())
            self._refusals.add(what, "layout", problem, overrides_of_axes(**sizes))
        return bool(problems)

    def _check_expert(self, expert: int) -> bool:
        problems = self._problems(Layout(shard=expert, expert=expert))
        if not problems:
            try:
                self._config.facts.of(ModelCut(expert=expert, attention=self._config.attention))
            except FactsError as error:
                problems = [str(error)]
        return not self._refused(problems, expert=expert)

    def _problems_of(self, layout: Layout, **options: Any) -> list[str]:
        """Return the strategies' problems with a layout for this module, whatever the other axes are."""
        given = self._config.options(**options)
        try:
            found = self._plan_for(layout, given)
            if layout.pipeline > 1:  # a pipeline counts all blocks
                found = replace(found, blocks=tuple(self._config.facts.blocks))
            problems = problems_of(self._config.small, found, layout, given)
        except ValueError as error:
            problems = [str(error)]
        if not self._config.module.automatic_optimization:
            problems += manual_optimization_problems(layout, given.sequence_parallel)
        for name in self._optimizers:
            problems += optimizer_problem(layout, name)
        if self._length is not None:
            problems += length_problems(layout, self._length, sequence_parallel=given.sequence_parallel)
        return problems

    def _plan_for(self, layout: Layout, given: EngineOptions) -> ModelPlan:
        """Return the plan with all that a layout needs; cached where possible, since building it is slow."""
        found = self._config.plan_of(layout.tensor)
        needs_blocks = layout.pipeline > 1 or layout.context > 1 or given.sequence_parallel
        lacks = (needs_blocks and not found.blocks) or (layout.tensor > 1 and not found.tensor)
        if lacks or (layout.expert > 1 and not found.experts):
            return plan_for(self._config.small, layout, given)  # its error says what is missing
        return found
