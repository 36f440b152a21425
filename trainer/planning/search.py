"""Which layouts are possible, what each would need and take, and which is fastest.

Axes are enumerated as divisors of the number of ranks. What the strategies refuse is refused here with their own words:
each axis is held against the module by the very checks that a run goes through, once for all layouts that share it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

from lightning.pytorch import LightningModule
from omegaconf import DictConfig, OmegaConf

from trainwright.strategies.engines import EngineOptions, plan_for, problems_of, stage_spans
from trainwright.strategies.hybrid_rules import length_problems, manual_optimization_problems, optimizer_problem
from trainwright.strategies.layout import Layout
from trainwright.strategies.pipeline.schedules import can_run
from trainwright.strategies.plan import ModelPlan
from trainwright.trainer.batch import solve_accumulation
from trainwright.trainer.check_layout import build_on_meta, meta_module
from trainwright.trainer.planning.batches import one_batch
from trainwright.trainer.planning.experts import Routing
from trainwright.trainer.planning.facts import Cut, FactsError, ModelFacts, Pass
from trainwright.trainer.planning.limits import OFFLOADS, Limits
from trainwright.trainer.planning.memory import (
    Held,
    Share,
    StateTable,
    UnitState,
    Work,
    held_by,
    in_flight,
    moments,
    share_of,
    state_of,
)
from trainwright.trainer.planning.profiles import DeviceProfile, profile_of
from trainwright.trainer.planning.time import StepTime, step_time
from trainwright.trainer.problems import ConfigError
from trainwright.trainer.targets import class_of
from trainwright.trainer.validate import Surroundings, world_size_of

USABLE = 0.92
"""Part of a device's memory that tensors may take; the rest is for its context, communicators, and gaps."""
# Ranks of the context axis are considered as long as each has so many positions, or at most two.
_POSITIONS = 2048
_MOST_MICRO_BATCHES, _MOST_IN_PIPELINE = 8, 3
_GIB = 2**30
_STAGES = (1, 2, 3)
# Of tokens that arrive at a rank, beside what arrives where all experts are chosen equally often.
_UNEVEN = 1.25
_PREFIX = "strategy."


@dataclass(frozen=True)
class Candidate:
    """A layout that is possible, how it is run, and what is predicted of it.

    Args:
        strategy: name: ``single``, ``ddp``, ``zero1`` to ``zero3``, ``hybrid``.
        work: layout and step.
        cut: how a pass is split.
        memory: of the rank that needs most, at the moment at which it does.
        time: of an optimizer step.
        samples: of an optimizer step.
        overrides: what to type behind the recipe to have it.
        at_step: most of each kind on any rank when the optimizer steps; what can be seen of it in a run.
        blocks: of the module that a rank has.
        block: the heaviest of them.
    """

    strategy: str
    work: Work
    cut: Cut
    memory: Held
    time: StepTime
    samples: int
    overrides: tuple[str, ...] = ()
    at_step: Held = field(default_factory=Held)
    blocks: int = 0
    block: UnitState = field(default_factory=UnitState)

    @property
    def layout(self) -> Layout:
        """Its axes, closed."""
        return self.work.layout

    @property
    def accumulation(self) -> int:
        """Micro-batches that a data rank accumulates."""
        return self.work.rounds

    @property
    def micro_batch_size(self) -> int:
        """Samples that a data rank reads at a time; a pipeline splits them."""
        return self.work.micro_batch * self.work.parts

    @property
    def samples_per_second(self) -> float:
        """Predicted."""
        return self.samples / self.time.total

    @property
    def title(self) -> str:
        """The strategy and its axes, for people."""
        return describe(self.strategy, self.layout, self.work.stage)


@dataclass(frozen=True)
class Refusal:
    """A layout that cannot be had.

    Args:
        what: strategy and axes.
        kind: ``"layout"`` (a strategy refuses it), ``"batch"`` or ``"memory"``.
        reason: what was given, what is allowed, what to type.
        overrides: what would be refused so if it was typed.
        needed: bytes a rank, where that is the reason.
    """

    what: str
    kind: str
    reason: str
    overrides: tuple[str, ...] = ()
    needed: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What was found.

    Args:
        name: of the recipe.
        world_size: ranks.
        profile: of their devices.
        precision: of the run.
        global_batch_size: samples of a step; None: each layout its own.
        ranked: possible layouts, the fastest first; one for each set of axes and stage.
        refused: all others.
        parameters: elements of the module.
        seconds: that planning took.
        considered: ways to run that were weighed.
        notes: what the first layout's bytes depend on beside sizes; sentences.
    """

    name: str
    world_size: int
    profile: DeviceProfile
    precision: str
    global_batch_size: int | None
    ranked: tuple[Candidate, ...]
    refused: tuple[Refusal, ...]
    parameters: int = 0
    seconds: float = 0.0
    considered: int = 0
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def best(self) -> Candidate | None:
        """The fastest; None if nothing is possible."""
        return self.ranked[0] if self.ranked else None


def describe(strategy: str, layout: Layout, stage: int) -> str:
    """``hybrid, stage 1: pipeline 8 x shard 16 x tensor 8``."""
    sizes = {**layout.sizes, "expert": layout.expert}
    axes = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    named = strategy if strategy != "hybrid" or layout.state_ranks == 1 else f"{strategy}, stage {stage}"
    return f"{named}: {axes}" if axes else named


def plan(cfg: DictConfig, limits: Limits | None = None) -> Plan:
    """Rank all layouts of a configuration's ranks by predicted step time.

    Args:
        cfg: as ``trainwright.compose`` returns it. Of ``strategy`` counts what says something about the model
            (``plan``, ``blocks``, ``batch_dims``), of ``devices`` and ``nodes`` their product; this machine need not
            have them.
        limits: what has been decided already; None: nothing.

    Raises:
        ConfigError: if the module cannot be built or run without memory, or the profile of the device is unknown.
    """
    began = time.monotonic()
    resolved = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    assert isinstance(resolved, DictConfig)
    found = _Search(resolved, limits or Limits()).run()
    return replace(found, seconds=time.monotonic() - began)


class Searched:
    """What is known of a configuration before layouts are looked at.

    Attributes:
        small: the module with two blocks of each kind, for questions whose answer is the same for all of them.

    Args:
        cfg: resolved.

    Raises:
        ConfigError: if the module cannot be built without memory, its data cannot be read, or the profile is unknown.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        try:
            self.profile = profile_of(cfg)
        except ValueError as error:
            raise ConfigError([str(error)]) from error
        self.world_size = world_size_of(cfg, Surroundings())
        self.module = _built(cfg)
        plain: Any = OmegaConf.to_container(cfg.strategy)
        self.said = {key: plain[key] for key in ("plan", "blocks", "batch_dims") if plain.get(key)}
        self.attention = plain.get("attention") or "ring"
        batch, samples = one_batch(cfg, self.module)
        self.facts = ModelFacts(
            self.module,
            batch,
            samples,
            cfg.precision,
            plan=self.said.get("plan"),
            blocks=self.said.get("blocks"),
            real=lambda: _real(cfg),
        )
        self.small, self._small_blocks = self.facts.reduced()
        self.table = StateTable(self.facts, self.plan_of, self.small, cfg.precision == "bf16-true")
        self.capacity = USABLE * self.profile.memory_bytes
        self._spans: dict[int, list[range]] = {}

    @cache  # noqa: B019 - lives as long as one search
    def plan_of(self, tensor: int) -> ModelPlan:
        """The plan of :attr:`small` with this size of the tensor axis."""
        return plan_for(self.small, Layout(tensor=tensor), self.options())

    def options(self, **given: Any) -> EngineOptions:
        """How the engines are told to cut :attr:`small`, with what the configuration says about the model."""
        plan = (
            {**self.said.get("plan", {}), "blocks": self._small_blocks} if self._small_blocks else self.said.get("plan")
        )
        dims = self.said.get("batch_dims", {})
        return EngineOptions(plan=plan or {}, batch_dims=dims, attention=self.attention, **given)

    def spans(self, stages: int) -> list[range]:
        """Blocks of each stage of a pipeline."""
        if stages not in self._spans:
            self._spans[stages] = stage_spans(
                self.module, ModelPlan(blocks=tuple(self.facts.blocks)), stages, "balanced"
            )
        return self._spans[stages]

    def shares(self, work: Work) -> tuple[Share, ...]:
        """What the first and the last rank of a pipeline have."""
        return self._shares_of(work.layout.pipeline, work.stages_per_rank, work.schedule)

    @cache  # noqa: B019 - lives as long as one search
    def _shares_of(self, pipeline: int, per_rank: int, schedule: str) -> tuple[Share, ...]:
        kinds = self.facts.kinds
        if pipeline == 1:
            return (share_of(kinds, [range(len(kinds))], 1, schedule, 0),)
        spans = self.spans(pipeline * per_rank)
        return tuple(share_of(kinds, spans, pipeline, schedule, rank) for rank in (0, pipeline - 1))


class _Search(Searched):
    def __init__(self, cfg: DictConfig, limits: Limits) -> None:
        super().__init__(cfg)
        self.limits = limits
        self.refused: dict[tuple[str, str], Refusal] = {}
        self.considered = 0
        self.length = _length(cfg)

    # ---- what is possible -------------------------------------------------------------------------------------------

    def run(self) -> Plan:
        """Everything."""
        best: dict[tuple[Any, ...], Candidate] = {}
        for candidate in self._candidates():
            key = (candidate.strategy, candidate.layout, candidate.work.stage)
            known = best.get(key)
            if known is None or candidate.samples_per_second > known.samples_per_second:
                best[key] = candidate
        ranked = sorted(best.values(), key=lambda each: -each.samples_per_second)
        ranked = [replace(each, overrides=self._overrides(each)) for each in ranked]
        possible = {each.title for each in ranked}
        refused = [each for each in self.refused.values() if each.what not in possible]
        return Plan(
            name=self.cfg.name,
            world_size=self.world_size,
            profile=self.profile,
            precision=self.cfg.precision,
            global_batch_size=self.cfg.global_batch_size,
            ranked=tuple(ranked),
            refused=tuple(refused),
            parameters=sum(parameter.numel() for parameter in self.module.parameters()),
            considered=self.considered,
            notes=tuple(self._notes(ranked[0])) if ranked else (),
        )

    def _notes(self, best: Candidate) -> Iterator[str]:
        """What a plan takes for granted."""
        if best.layout.expert == 1:
            return
        more = replace(best.cut, routing=Routing(received=_UNEVEN, computed=_UNEVEN))
        even, uneven = (self._held(best.work, self.facts.near(cut)).total for cut in (best.cut, more))
        yield (
            "experts are taken to be chosen evenly by the tokens of all ranks; a rank to which "
            f"{100 * (_UNEVEN - 1):.0f} % more travels than to the mean needs {max(uneven - even, 0) / _GIB:.2f} GiB "
            "more in the first layout (seen in a run: rank_imbalance)"
        )

    def _refuse(self, what: str, kind: str, reason: str, overrides: Sequence[str] = (), needed: float = 0.0) -> None:
        known = self.refused.get((what, kind))
        if known is None or (needed and needed < known.needed):
            self.refused[what, kind] = Refusal(what, kind, reason, tuple(overrides), needed)

    def _candidates(self) -> Iterator[Candidate]:
        world = self.world_size
        node = max(self.profile.devices_per_node, 1)
        given = self.limits.axes.get("tensor")
        tensors = [given] if given and world % given == 0 else [t for t in _divisors(world) if t <= node]
        for tensor in filter(self._allows_tensor, tensors):
            sequence = tensor > 1 and self.limits.sequence_parallel is not False and self._splits_sequence(tensor)
            for context in self._contexts(world // tensor, tensor, sequence):
                cut = self._cut(tensor, context, sequence)
                if cut is None:
                    continue
                for pipeline in self._pipelines(world // (tensor * context), tensor, sequence):
                    yield from self._with_data(cut, pipeline, world // (tensor * context * pipeline))

    def _cut(self, tensor: int, context: int, sequence: bool) -> Cut | None:
        """How a pass is split; None if the module does not run so."""
        cut = Cut(tensor=tensor, context=context, sequence_parallel=sequence, attention=self.attention)
        ways = [cut]
        may_split_loss = tensor > 1 and context == 1 and self.limits.loss_parallel is not False
        if may_split_loss and self._allows(Layout(tensor=tensor), loss_parallel=True):
            ways.insert(0, replace(cut, loss_parallel=True))
        problem = ""
        for way in ways:
            try:
                self.facts.near(way)
            except FactsError as error:
                problem = str(error)
            else:
                return way
        if tensor * context == 1:
            raise ConfigError([problem])
        what = describe("hybrid", Layout(tensor=tensor, context=context), 1)
        self._refuse(what, "layout", problem, self._axes(tensor=tensor, context=context))
        return None

    def _allows(self, layout: Layout, **options: Any) -> bool:
        return not self._problems(layout, **options)

    def _problems(self, layout: Layout, **options: Any) -> list[str]:
        """What the strategies say against a layout for this module; whatever the other axes are."""
        given = self.options(**options)
        try:
            found = self._plan_for(layout, given)
            if layout.pipeline > 1:  # which counts all blocks
                found = replace(found, blocks=tuple(self.facts.blocks))
            problems = problems_of(self.small, found, layout, given)
        except ValueError as error:
            problems = [str(error)]
        if not self.module.automatic_optimization:
            problems += manual_optimization_problems(layout, options, _PREFIX)
        for name in self._optimizers:
            problem = optimizer_problem(layout, name)
            problems += [problem] if problem else []
        if self.length is not None:
            problems += length_problems(layout, {"balance": True, **options}, self.length, _PREFIX)
        return problems

    def _plan_for(self, layout: Layout, given: EngineOptions) -> ModelPlan:
        """The plan with all that a layout needs; finding it out takes long for many blocks, so it is done once."""
        found = self.plan_of(layout.tensor)
        needs_blocks = layout.pipeline > 1 or layout.context > 1 or given.sequence_parallel
        lacks = (needs_blocks and not found.blocks) or (layout.tensor > 1 and not found.tensor)
        if lacks or (layout.expert > 1 and not found.experts):
            return plan_for(self.small, layout, given)  # which says what is missing
        return found

    @property
    def _optimizers(self) -> list[str]:
        optimizer = self.cfg.optimizer
        return [class_of(optimizer)] if isinstance(optimizer, DictConfig) else []

    def _allows_tensor(self, tensor: int) -> bool:
        if tensor == 1:
            return True
        problems = self._problems(Layout(tensor=tensor))
        for problem in problems[:1]:
            self._refuse(f"tensor {tensor}", "layout", problem, self._axes(tensor=tensor))
        return not problems

    def _splits_sequence(self, tensor: int) -> bool:
        return self._allows(Layout(tensor=tensor), sequence_parallel=True)

    def _contexts(self, rest: int, tensor: int, sequence: bool) -> Iterator[int]:
        given = self.limits.axes.get("context")
        most = given or max(2, (self.length or 0) // _POSITIONS)
        for context in _divisors(rest):
            if not self.limits.allow_axis("context", context):
                continue
            if context == 1:
                yield context
                continue
            if context > most:
                return
            problems = list(self._problems_of_context(context))
            if self.length is not None and sequence:
                both = Layout(context=context, tensor=tensor)
                problems += length_problems(both, {"sequence_parallel": True}, self.length, _PREFIX)
            for problem in problems[:1]:
                self._refuse(f"context {context}", "layout", problem, self._axes(context=context))
            if not problems:
                yield context

    def _pipelines(self, rest: int, tensor: int, sequence: bool) -> Iterator[int]:
        for pipeline in _divisors(rest):
            if not self.limits.allow_axis("pipeline", pipeline):
                continue
            if pipeline == 1:
                yield pipeline
                continue
            problems = self._problems_of_pipeline(pipeline)
            for problem in problems[:1]:
                self._refuse(f"pipeline {pipeline}", "layout", problem, self._axes(pipeline=pipeline))
            if not problems:
                yield pipeline
            elif pipeline > max(len(self.facts.blocks), 1):
                return

    @cache  # noqa: B019 - lives as long as one search
    def _problems_of_context(self, context: int) -> list[str]:
        return self._problems(Layout(context=context))

    @cache  # noqa: B019 - lives as long as one search
    def _problems_of_pipeline(self, pipeline: int) -> list[str]:
        return self._problems(Layout(pipeline=pipeline))

    # ---- ways to run it ---------------------------------------------------------------------------------------------

    def _with_data(self, cut: Cut, pipeline: int, data: int) -> Iterator[Candidate]:
        """Candidates that leave so many ranks to the data axes."""
        batch = self.cfg.global_batch_size
        if batch is not None and batch % data:
            layout = Layout(pipeline=pipeline, tensor=cut.tensor, context=cut.context, replicate=data)
            strategy = "hybrid" if pipeline * cut.tensor * cut.context > 1 else "ddp"
            try:
                solve_accumulation(batch, 1, data)
            except ValueError as error:
                overrides = (*self._axes_of(strategy, layout, 1), "micro_batch_size=1")
                self._refuse(_data_title(pipeline, cut, data), "batch", str(error), overrides)
            return
        samples = None if batch is None else batch // data
        given = self.limits.axes.get("shard") or data // self.limits.axes.get("replicate", data)
        shards = _shards(data, max(self.profile.devices_per_node // (cut.tensor * cut.context), 1))
        for shard in sorted({*shards, *([given] if given and data % given == 0 else [])}):
            layout = Layout(
                pipeline=pipeline, replicate=data // shard, shard=shard, context=cut.context, tensor=cut.tensor
            )
            for expert in self._experts(layout):
                whole = replace(layout, expert=expert)
                for strategy, stage in _strategies(whole):
                    if not self.limits.allow_layout(whole, stage):
                        continue
                    yield from self._ways(strategy, stage, whole, replace(cut, expert=expert), samples)

    def _experts(self, layout: Layout) -> Iterator[int]:
        yield 1
        if not self.plan_of(1).experts:
            return
        for expert in _divisors(layout.state_ranks)[1:]:
            if self.limits.allow_axis("expert", expert) and not self._problems_of_experts(expert):
                yield expert

    @cache  # noqa: B019 - lives as long as one search
    def _problems_of_experts(self, expert: int) -> list[str]:
        problems = self._problems(Layout(shard=expert, expert=expert))
        if not problems:
            try:
                self.facts.of(Cut(expert=expert, attention=self.attention))
            except FactsError as error:
                problems = [str(error)]
        for problem in problems[:1]:
            self._refuse(f"expert {expert}", "layout", problem, self._axes(expert=expert))
        return problems

    def _ways(self, strategy: str, stage: int, layout: Layout, cut: Cut, samples: int | None) -> Iterator[Candidate]:
        """The fastest way to run a layout that fits, with and without checkpointing; offloading only if none does."""
        least: tuple[float, Held] | None = None
        for offload in self.limits.allowed("offload", OFFLOADS):
            if offload != "none" and (stage == 0 or (offload == "parameters" and not _may_offload(stage, layout))):
                continue
            fitting = []
            ways = ("none", "full") if self.facts.blocks else ("none",)
            for checkpointing in self.limits.allowed("checkpointing", ways):
                cost = self._cost(replace(cut, checkpointing=checkpointing))
                if cost is None:
                    continue
                for works in self._works(stage, layout, samples, offload):
                    for work in works:
                        held = self._held(work, cost)
                        if least is None or held.total < least[0]:
                            least = held.total, held
                        if held.total > self.capacity or held.host > self.profile.host_memory_bytes:
                            continue
                        way = replace(cut, checkpointing=checkpointing)
                        fitting.append(self._candidate(strategy, work, cost, held, way))
                        break  # the first of these that fits is the fastest
            if fitting:
                yield min(fitting, key=lambda each: each.time.total / each.samples)
                return
        if least is not None:
            reason = _too_large(least[1], self.capacity, self.profile)
            what = describe(strategy, layout, stage)
            self._refuse(what, "memory", reason, self._axes_of(strategy, layout, stage), least[0])

    def _cost(self, cut: Cut) -> Pass | None:
        try:
            return self.facts.near(cut)
        except FactsError:
            return None

    def _works(self, stage: int, layout: Layout, samples: int | None, offload: str) -> Iterator[Iterator[Work]]:
        """Ways to run a layout, those together that are the faster the sooner they come."""
        reads = self.limits.micro_batch_size or samples  # of a data rank in one round
        rounds = 1 if samples is None or reads is None else samples // reads
        if reads is not None and samples is not None and samples % reads:
            return
        sizes = _micro_batches(reads)
        if layout.pipeline == 1:
            sizes = sizes if self.limits.micro_batch_size is None else [self.limits.micro_batch_size]
            # Large micro-batches gather parameters less often.
            works = (
                Work(layout, stage, micro_batch=size, rounds=1 if samples is None else samples // size, offload=offload)
                for size in sizes
            )
            yield filter(self.limits.allow_work, works)
            return
        if reads is not None and reads < layout.pipeline:
            self._refuse_few(layout, stage, reads)
        for schedule, per_rank in self._schedules(layout.pipeline):
            # Many micro-batches leave less of a bubble, and need less memory each.
            for size in self._sizes_in_pipeline(sizes, reads):
                parts = 4 * layout.pipeline if reads is None else reads // size
                stages = layout.pipeline * per_rank
                if parts >= layout.pipeline and can_run(schedule, parts, layout.pipeline, stages):
                    work = Work(layout, stage, size, rounds, parts, schedule, per_rank, offload)
                    yield filter(self.limits.allow_work, [work])

    def _sizes_in_pipeline(self, sizes: Sequence[int], reads: int | None) -> list[int]:
        if self.limits.parts is not None and reads is not None:
            return [reads // self.limits.parts] if reads % self.limits.parts == 0 else []
        return sorted(sizes)[:_MOST_IN_PIPELINE]

    def _refuse_few(self, layout: Layout, stage: int, samples: int) -> None:
        overrides = (*self._axes_of("hybrid", layout, stage), f"micro_batch_size={samples}")
        reason = (
            f"micro_batch_size={samples} with strategy.micro_batches={layout.pipeline}, the default of schedule=1f1b: "
            "a pipeline splits the micro_batch_size samples of a data rank into that many parts, so each needs a "
            f"sample; type micro_batch_size={layout.pipeline}"
        )
        self._refuse(
            _data_title(layout.pipeline, Cut(layout.tensor, layout.context), layout.data_ranks),
            "batch",
            reason,
            overrides,
        )

    def _schedules(self, pipeline: int) -> list[tuple[str, int]]:
        """The most interleaved first: it idles least."""
        blocks = len(self.facts.blocks)
        several = [v for v in (8, 6, 5, 4, 3, 2) if pipeline * v <= blocks and (blocks % (pipeline * v) == 0 or v == 2)]
        return [*(("interleaved_1f1b", v) for v in several[:3]), ("1f1b", 1)]

    def _held(self, work: Work, cost: Pass) -> Held:
        self.considered += 1
        pipeline, shares = work.layout.pipeline, self.shares(work)
        places = (0, pipeline - 1) if pipeline > 1 else (0,)
        return max(
            (
                held_by(
                    self.table, cost, work, share,
                    in_flight(work.schedule, pipeline, work.stages_per_rank, work.parts, place),
                )
                for share, place in zip(shares, places, strict=True)
            ),
            key=lambda held: held.total,
        )  # fmt: skip

    def _candidate(self, strategy: str, work: Work, cost: Pass, held: Held, cut: Cut) -> Candidate:
        seconds = step_time(self.table, cost, work, self.shares(work), self.profile, self.cfg.precision)
        samples = work.micro_batch * work.rounds * work.parts * work.layout.data_ranks
        at_step = held_at_step(self.table, cost, work, self.shares(work))
        share = self.shares(work)[0]
        _, heaviest, _ = state_of(self.table, work, share)
        blocks = sum(share.blocks.values())
        return Candidate(
            strategy, work, cut, held, seconds, samples, at_step=at_step, blocks=blocks, block=heaviest
        )  # fmt: skip

    # ---- what to type -----------------------------------------------------------------------------------------------

    def _overrides(self, candidate: Candidate) -> tuple[str, ...]:
        work, cut = candidate.work, candidate.cut
        words = [*self._where(), *self._axes_of(candidate.strategy, candidate.layout, work.stage)]
        if work.has_pipeline:
            words += [f"strategy.schedule={work.schedule}"] if work.schedule != "1f1b" else []
            words += [f"strategy.stages_per_rank={work.stages_per_rank}"] if work.stages_per_rank not in (1, 2) else []
            words.append(f"strategy.micro_batches={work.parts}")
        words += ["strategy.sequence_parallel=true"] if cut.sequence_parallel else []
        words += ["strategy.loss_parallel=true"] if cut.loss_parallel else []
        words += [f"strategy.attention={cut.attention}"] if cut.context > 1 and cut.attention != "ring" else []
        words += ["strategy.activation_checkpointing=full"] if cut.checkpointing == "full" else []
        words += [f"strategy.offload={work.offload}"] if work.offload != "none" else []
        for key, value in self.said.items():
            if key == "blocks" or candidate.strategy == "hybrid":
                words.append(f"strategy.{key}={_typed(value)}")
        words.append(f"micro_batch_size={candidate.micro_batch_size}")
        if self.cfg.accumulation.steps is not None:
            words.append(f"accumulation.steps={candidate.accumulation}")
        return tuple(words)

    def _where(self) -> list[str]:
        """Devices of a machine and machines, where more were asked of one machine than it has."""
        node = self.profile.devices_per_node
        if not isinstance(self.cfg.devices, int) or self.cfg.devices <= node or self.world_size % node:
            return []
        return [f"devices={node}", f"nodes={self.world_size // node}"]

    def _axes(self, **sizes: int) -> tuple[str, ...]:
        """The overrides of a layout of the whole world with these axes, for what is refused whatever the others are."""
        return ("strategy=hybrid", *(f"strategy.{axis}={size}" for axis, size in sizes.items()))

    def _axes_of(self, strategy: str, layout: Layout, stage: int) -> tuple[str, ...]:
        words = [f"strategy={strategy}"]
        if strategy in ("single", "ddp"):
            return tuple(words)
        if strategy != "hybrid":
            words += [f"strategy.replicate={layout.replicate}"] if layout.replicate > 1 else []
            words += [f"strategy.shard={layout.shard}"] if layout.replicate > 1 else []
            return tuple(words)
        for axis in ("pipeline", "replicate", "shard", "context", "tensor", "expert"):
            size = getattr(layout, axis)
            if size != 1 or axis == "shard":
                words.append(f"strategy.{axis}={size}")
        return (*words, f"strategy.stage={stage}")


# ---------------------------------------------------------------------------------------------------------------------


def held_at_step(table: StateTable, cost: Pass, work: Work, shares: Sequence[Share]) -> Held:
    """What the first and the last rank of a pipeline hold when the optimizer steps; of each kind the most."""
    last = [moments(table, cost, work, share, 1)[-1] for share in shares]
    kinds = ("parameters", "gradients", "optimizer", "host")
    most = {kind: max(getattr(held, kind) for held in last) for kind in kinds}
    return Held(**most, moment=last[0].moment)


def _built(cfg: DictConfig) -> LightningModule:
    module = meta_module(cfg)
    if module is not None:
        return module
    try:
        return build_on_meta(cfg)
    except Exception as error:
        why = (str(error).splitlines() or [repr(error)])[0]
        raise ConfigError(
            [f"module: it cannot be built without memory, so nothing can be planned for it: {why}"]
        ) from error


def _real(cfg: DictConfig) -> LightningModule:
    """The module of a configuration with memory on the CPU."""
    import torch
    from hydra.utils import instantiate

    module: LightningModule = instantiate(cfg.module, _convert_="all")
    module.configure_model()
    if any(parameter.is_meta for parameter in module.parameters()):
        module.to_empty(device="cpu")
        for part in module.modules():
            reset = getattr(part, "reset_parameters", None)
            if callable(reset):
                with torch.no_grad():
                    reset()
    return module


def _length(cfg: DictConfig) -> int | None:
    """Positions of a sequence, where module and data have them from one `seq_len`."""
    lengths = {OmegaConf.select(cfg, key) for key in ("module.seq_len", "module.config.seq_len", "data.seq_len")}
    lengths -= {None}
    length = lengths.pop() if len(lengths) == 1 else None
    return length if isinstance(length, int) and OmegaConf.select(cfg, "data.seq_len") is not None else None


@lru_cache(maxsize=256)
def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _shards(data: int, node: int) -> list[int]:
    """Sizes of the shard axis that are looked at: none, all, those of a node, and some in between."""
    found, divisors = {1, data}, _divisors(data)
    found |= {max(d for d in divisors if d <= node)}
    last = 1
    for each in divisors:
        if each >= 4 * last:
            found.add(each)
            last = each
    return sorted(found)


def _strategies(layout: Layout) -> list[tuple[str, int]]:
    if layout.pipeline * layout.context * layout.tensor * layout.expert == 1:
        if layout.world_size == 1:
            return [("single", 0)]
        return [("ddp", 0)] if layout.shard == 1 else [(f"zero{stage}", stage) for stage in _STAGES]
    if layout.state_ranks == 1:
        return [("hybrid", 1)]
    # A pipeline holds whole gradients until all its micro-batches are done, so stage 2 is stage 1 there.
    return [("hybrid", stage) for stage in (_STAGES if layout.pipeline == 1 else (1, 3))]


def _may_offload(stage: int, layout: Layout) -> bool:
    return stage == 3 and layout.state_ranks > 1


def _micro_batches(samples: int | None) -> list[int]:
    """Sizes of a micro-batch that are tried, the largest first."""
    if samples is None:
        return [32, 16, 8, 4, 2, 1]
    divisors = [d for d in _divisors(samples) if d <= 256]
    if len(divisors) > _MOST_MICRO_BATCHES:
        halved = [d for d in divisors if d & (d - 1) == 0]
        divisors = halved if len(halved) > 2 else divisors[:_MOST_MICRO_BATCHES]
    return divisors[::-1]


def _data_title(pipeline: int, cut: Cut, data: int) -> str:
    axes = {"pipeline": pipeline, "context": cut.context, "tensor": cut.tensor}
    others = "".join(f" x {axis} {size}" for axis, size in axes.items() if size > 1)
    return f"{data} data ranks{others}"


def _too_large(held: Held, capacity: float, profile: DeviceProfile) -> str:
    parts = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "activations": held.activations,
        "buffers": held.buffers,
    }
    listed = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts.items() if size > 0.05 * _GIB)
    if held.host > profile.host_memory_bytes:
        return (
            f"needs {held.host / _GIB:.1f} GiB of host memory a rank, device={profile.name} has "
            f"{profile.host_memory_bytes / _GIB:.1f} GiB"
        )
    return (
        f"needs {held.total / _GIB:.1f} GiB a rank at the least ({listed}), device={profile.name} has "
        f"{capacity / _GIB:.1f} GiB for it"
    )


def _typed(value: Any) -> str:
    """A value as Hydra's command line takes it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_typed(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_typed(each) for each in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
