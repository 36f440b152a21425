"""Options of ``strategy=hybrid``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainwright.core.config.options import class_of, number
from trainwright.core.config.override_words import typed
from trainwright.core.layout import Layout
from trainwright.core.problems import did_you_mean
from trainwright.strategies.compose.engine_options import EngineOptions, is_split
from trainwright.strategies.compose.rules import (
    PLAN_PARTS,
    averaging_problem,
    cuts_module,
    length_problems,
    manual_optimization_problems,
    optimizer_problem,
    sync_batchnorm_problem,
)
from trainwright.strategies.contract.options import AVERAGING_CALLBACKS, PlannedRun
from trainwright.strategies.data.options import ZeroOptions
from trainwright.strategies.parameter_server.tables.placement import placement_problems, placement_run_problems
from trainwright.strategies.pipeline.schedules import CHOICES, can_run

# Option -> the axis that it needs, and its effect.
AXIS_OPTIONS: Mapping[str, tuple[str, str]] = {
    "schedule": ("pipeline", "it orders the work of pipeline stages"),
    "micro_batches": ("pipeline", "it splits a batch for pipeline stages"),
    "stages_per_rank": ("pipeline", "it counts pipeline stages"),
    "split": ("pipeline", "it assigns blocks to pipeline stages"),
    "stage_dtype": ("pipeline", "it is the dtype of what pipeline stages send"),
    "batch_dims": ("pipeline", "it defines how a batch is split for pipeline stages"),
    "sequence_parallel": ("tensor", "it splits activations over the tensor axis"),
    "loss_parallel": ("tensor", "it splits logits over the tensor axis"),
    "attention": ("context", "it defines how context ranks exchange keys and values"),
    "balance": ("context", "it defines how the sequence is distributed over ranks"),
}


@dataclass
class HybridOptions(EngineOptions, ZeroOptions):
    """`strategy=hybrid`: any layout, ZeRO on its shard axis."""

    _target_: str = "trainwright.strategies.compose.hybrid.HybridStrategy"
    # ZeRO stage on shard x context.
    stage: int = number(3, least=1, most=3)
    # Ranks with different stages of the model; -1 = the rest, 1 = off.
    pipeline: int = number(1, least=-1)
    # Ranks that split the sequence of the same samples; -1 = the rest, 1 = off.
    context: int = number(1, least=-1)
    # Ranks that split each weight of a layer; -1 = the rest, 1 = off.
    tensor: int = number(1, least=-1)
    # Ranks with different experts, a divisor of shard x context; -1 = all of these, 1 = off.
    expert: int = number(1, least=-1)
    # Placement of parameters: name pattern -> parameter_server (embedding tables), shard or replicate; the first match
    # counts; null = as in the layout. Like {embedding.*:parameter_server,*:shard}.
    placement: Any = None
    # With placement: number of parameter servers, one on each of the first ranks.
    table_servers: int = number(1, least=1)
    # With placement: network interface of the servers; null = the loopback address only, for one machine.
    interface: str | None = None

    has_any_stage = True

    # ---- facts ----------------------------------------------------------------------------------------------------

    @property
    def planned_as(self) -> str | None:
        """See the base class."""
        return "hybrid"

    @property
    def takes_sparse_gradients(self) -> bool:
        """True if embedding tables on servers take sparse gradients."""
        return bool(self.placement)  # refused elsewhere, if tables are not among it

    @property
    def rounds_to(self) -> tuple[str, ...]:
        """See the base class."""
        return super().rounds_to + (() if self.stage_dtype is None else (self.stage_dtype,))

    def least_batch(self, layout: Layout) -> int:
        """Return one sample per micro-batch of a pipeline."""
        return 1 if layout.pipeline == 1 else self.micro_batches_for(layout.pipeline)

    # ---- under a layout -------------------------------------------------------------------------------------------

    def layout_problems(self, layout: Layout) -> Iterator[str]:
        """See the base class."""
        yield from super().layout_problems(layout)
        yield from self._without_effect(layout)
        if any(self.value_problems()):
            return  # the rest computes with the values
        yield from self._pipeline_problems(layout)
        alone = layout.replicate == layout.shard == layout.context == 1
        if self.offload == "parameters" and self.stage == 3 and alone and cuts_module(layout):
            yield (
                "strategy.offload=parameters with shard=1 and context=1 has no effect: it offloads the shards that "
                "ranks of these axes gather. Type strategy.offload=optimizer, or strategy.shard=2"
            )
        yield from self._plan_problems(layout)
        yield from placement_problems(layout, self.placement, self.table_servers, self.interface)

    def _without_effect(self, layout: Layout) -> Iterator[str]:
        defaults = EngineOptions()
        for option, (axis, what) in AXIS_OPTIONS.items():
            given = getattr(self, option)
            if getattr(layout, axis) == 1 and given is not None and given != getattr(defaults, option):
                yield (
                    f"strategy.{option}={typed(given)} with {axis}=1 has no effect: {what}. Leave it out, or type "
                    f"strategy.{axis}=2"
                )

    def _pipeline_problems(self, layout: Layout) -> Iterator[str]:
        schedule, per_rank, pipeline = self.schedule, self.stages_per_rank, layout.pipeline
        if pipeline == 1:
            return
        choice = CHOICES[schedule]
        if choice.splits_backward and self.compile:
            yield (
                f"strategy.schedule={schedule} with strategy.compile=true: it computes input and weight gradients "
                "separately, which compiled blocks do not support. Type strategy.compile=false, or "
                "strategy.schedule=interleaved_1f1b"
            )
        if per_rank is not None and choice.fixed and per_rank != choice.stages_per_rank:
            several = ", or choose one that takes several: " + ", ".join(n for n, c in CHOICES.items() if not c.fixed)
            yield (
                f"strategy.stages_per_rank={per_rank} with strategy.schedule={schedule}, which has exactly "
                f"{choice.stages_per_rank}; leave stages_per_rank out{several}"
            )
        elif pipeline != -1:
            yield from self._stage_problems(pipeline, self.stages(pipeline))

    def _stage_problems(self, pipeline: int, stages: int) -> Iterator[str]:
        schedule, parts, split = self.schedule, self.micro_batches, self.split
        if parts is not None and not can_run(schedule, parts, pipeline, stages):
            possible = [m for m in range(1, 4 * stages + 1) if can_run(schedule, m, pipeline, stages)][:8]
            yield (
                f"strategy.micro_batches={parts} with strategy.schedule={schedule} on {pipeline} ranks with {stages} "
                f"stages: allowed are {', '.join(map(str, possible))}, ...; type "
                f"strategy.micro_batches={possible[-1]}"
            )
        if is_split(split) and len(split) != stages:
            yield (
                f"strategy.split={typed(split)} names {len(split)} stages, but {pipeline} ranks with "
                f"{stages // pipeline} each make {stages}; give {stages} numbers, or leave split out"
            )

    def _plan_problems(self, layout: Layout) -> Iterator[str]:
        plan = {part: value for part, value in self.plan.items() if value is not None}
        for part in plan:
            if part not in PLAN_PARTS:
                yield f"strategy.plan.{part}: there is no such part; {did_you_mean(part, PLAN_PARTS, 'parts')}"
        if plan and not cuts_module(layout):
            yield (
                "strategy.plan with pipeline, context, tensor and expert all 1 has no effect: it defines where the "
                "module may be split. Leave it out, or type strategy.tensor=2"
            )
        if plan.get("blocks") is not None and self.blocks is not None:
            yield "strategy.blocks and strategy.plan.blocks are both given; they mean the same, so leave one out"

    # ---- beside ---------------------------------------------------------------------------------------------------

    def run_problems(self, run: PlannedRun) -> Iterator[str]:
        """See the base class."""
        yield from super().run_problems(run)
        if self.placement and run.verb == "fit":
            yield from placement_run_problems(run, self.interface)
        if run.layout is None:
            return
        yield from self._length_problems(run)
        if not cuts_module(run.layout):
            return
        for key, _, name in run.parts("callbacks"):
            if name in AVERAGING_CALLBACKS and run.layout.expert > 1:
                yield f"{key}: {averaging_problem(name)}"
        if run.cfg.trainer.sync_batchnorm:
            yield from sync_batchnorm_problem(run.layout)
        yield from (f"optimizer: {each}" for each in optimizer_problem(run.layout, class_of(run.cfg.optimizer)))

    def _length_problems(self, run: PlannedRun) -> Iterator[str]:
        assert run.layout is not None
        length = sequence_length(run.cfg)
        if length is not None and length >= 1:
            found = length_problems(run.layout, length, balance=self.balance, sequence_parallel=self.sequence_parallel)
            yield from (f"data.seq_len={length}: {each}" for each in found)

    def module_problems(self, run: PlannedRun, build: Any) -> Iterator[str]:
        """See the base class: check the layout against the module, if it is partitioned."""
        layout = run.layout
        if layout is None or not cuts_module(layout):
            return
        module = build()
        if module is None:
            return
        from trainwright.strategies.compose.engines import problems_of
        from trainwright.strategies.compose.model_plan import plan_for

        found = [] if module.automatic_optimization else manual_optimization_problems(layout, self.sequence_parallel)
        is_refused = any(self.problems()) or any(self.layout_problems(layout))
        options = self._of_the_model() if is_refused else self
        try:
            found += problems_of(module, plan_for(module, layout, options), layout, options)
        except ValueError as error:
            found.append(str(error))
        except Exception:
            return  # a fault of the module is reported by the ranks, with its traceback
        yield from (f"{layout} for {type(module).__name__}: {problem}" for problem in found)

    def _of_the_model(self) -> EngineOptions:
        """Return the options about the model only, if others were refused."""
        plan = {part: value for part, value in self.plan.items() if part in PLAN_PARTS}
        return EngineOptions(blocks=self.blocks, plan=plan)


def sequence_length(cfg: Any) -> int | None:
    """Return the sequence length, if module and data share one ``seq_len``; ``None`` otherwise."""
    data, module = cfg.data.get("seq_len"), cfg.module
    config = module.get("config")
    given = {data, module.get("seq_len"), config.get("seq_len") if hasattr(config, "get") else None}
    return data if isinstance(data, int) and given - {None} == {data} else None


@dataclass
class TensorOptions(HybridOptions):
    """`strategy=tensor`."""

    _target_: str = "trainwright.strategies.compose.one_axis.TensorParallelStrategy"
    # Ranks that split each weight of a layer; -1 = the rest.
    tensor: int = number(-1, least=-1)
    # Ranks over which ZeRO splits the state; 1 = off.
    shard: int = number(1, least=-1)


@dataclass
class PipelineOptions(HybridOptions):
    """`strategy=pipeline`."""

    _target_: str = "trainwright.strategies.compose.one_axis.PipelineStrategy"
    # Ranks with different stages of the model; -1 = the rest.
    pipeline: int = number(-1, least=-1)
    # Ranks over which ZeRO splits the state; 1 = off.
    shard: int = number(1, least=-1)


@dataclass
class ContextOptions(HybridOptions):
    """`strategy=context`."""

    _target_: str = "trainwright.strategies.compose.one_axis.ContextParallelStrategy"
    # Ranks that split the sequence of the same samples; -1 = the rest.
    context: int = number(-1, least=-1)
    # Ranks that read different samples and share the state by ZeRO; 1 = off.
    shard: int = number(1, least=-1)


@dataclass
class ExpertOptions(HybridOptions):
    """`strategy=expert`."""

    _target_: str = "trainwright.strategies.compose.one_axis.ExpertParallelStrategy"
    # Ranks with different experts, a divisor of shard x context; -1 = all of these.
    expert: int = number(-1, least=-1)
