"""Which layouts are possible, what each would need and take, and which is fastest.

Axes are enumerated as divisors of the number of ranks. What the strategies refuse is refused here with their own words:
each axis is held against the module by the very checks that a run goes through, once for all layouts that share it.
For each layout the fastest way to run it that fits is found (micro-batches, schedules, activation checkpointing,
offloading).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from trainwright.core.config.missing import resolved
from trainwright.core.global_batch import solve_accumulation
from trainwright.core.layout import Layout
from trainwright.planning.memory.peak import Held
from trainwright.planning.model.experts import Routing
from trainwright.planning.model.without_memory import FactsError
from trainwright.planning.search.axes import Axes
from trainwright.planning.search.limits import Limits
from trainwright.planning.search.overrides import overrides_of, overrides_of_layout
from trainwright.planning.search.plan import LayoutCandidate, Plan, Refusals, describe, describe_data, too_large
from trainwright.planning.search.searched import Searched
from trainwright.planning.search.sizes import micro_batches_of, shards_of, strategies_for
from trainwright.planning.search.work import Work
from trainwright.planning.time.cost import ModelCut, PassCost
from trainwright.strategies.compose.check_strategy import too_few_samples
from trainwright.strategies.compose.rules import cuts_module
from trainwright.strategies.data.zero_options import OFFLOADS
from trainwright.strategies.pipeline.schedules import can_run

_MOST_IN_PIPELINE = 3


class Ways:
    """Finds for a layout the fastest way to run it that fits; where none does, the refusals get a reason.

    Args:
        searched: the configuration.
        limits: what has been decided.
        refusals: what is added to.

    Attributes:
        considered: ways that were weighed.
    """

    def __init__(self, searched: Searched, limits: Limits, refusals: Refusals) -> None:
        self._searched, self._limits, self._refusals = searched, limits, refusals
        self.considered = 0

    def fastest(
        self, strategy: str, stage: int, layout: Layout, cut: ModelCut, samples: int | None
    ) -> LayoutCandidate | None:
        """With and without checkpointing; offloading only if nothing fits without.

        Args:
            strategy: name.
            stage: of ZeRO; 0: none.
            layout: closed.
            cut: how a pass is split, but for checkpointing.
            samples: of a data rank in a step; ``None``: as many as are best.
        """
        least: Held | None = None
        for offload in self._limits.allowed("offload", OFFLOADS):
            if offload != "none" and (stage == 0 or (offload == "parameters" and not _may_offload(stage, layout))):
                continue
            fitting = []
            ways = ("none", "full") if self._searched.facts.blocks else ("none",)
            for checkpointing in self._limits.allowed("activation_checkpointing", ways):
                way = replace(cut, checkpointing=checkpointing)
                cost = self._cost(way)
                if cost is None:
                    continue
                for works in self._works(stage, layout, samples, offload):
                    for work in works:
                        held = self._held(work, cost)
                        if least is None or held.total < least.total:
                            least = held
                        if self._searched.fits(held):
                            fitting.append(self._searched.candidate(strategy, work, way, cost, held))
                            break  # the first of these that fits is the fastest
            if fitting:
                return min(fitting, key=lambda each: each.time.total / each.samples)
        if least is not None:
            reason = too_large(least, self._searched.capacity, self._searched.profile)
            overrides = overrides_of_layout(strategy, layout, stage)
            self._refusals.add(describe(strategy, layout, stage), "memory", reason, overrides, least.total)
        return None

    def _cost(self, cut: ModelCut) -> PassCost | None:
        try:
            return self._searched.facts.near(cut)
        except FactsError:
            return None

    def _held(self, work: Work, cost: PassCost) -> Held:
        self.considered += 1
        return self._searched.held(work, cost)

    def _works(self, stage: int, layout: Layout, samples: int | None, offload: str) -> Iterator[Iterator[Work]]:
        """Ways to run a layout, those together that are the faster the sooner they come."""
        asked = self._limits.micro_batch_size
        reads = asked or samples  # of a data rank in one round
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
            # Many micro-batches leave less of a bubble, and need less memory each.
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
        """Schedules and stages of a rank; the most interleaved first: it idles least."""
        blocks = len(self._searched.facts.blocks)
        several = [v for v in (8, 6, 5, 4, 3, 2) if pipeline * v <= blocks and (blocks % (pipeline * v) == 0 or v == 2)]
        return [*(("interleaved_1f1b", v) for v in several[:3]), ("1f1b", 1)]

    def _refuse_few(self, layout: Layout, stage: int, samples: int) -> None:
        overrides = (*overrides_of_layout("hybrid", layout, stage), f"micro_batch_size={samples}")
        reason = too_few_samples(samples, layout.pipeline, default_of="1f1b")
        self._refusals.add(describe_data(layout), "batch", reason, overrides)


def _may_offload(stage: int, layout: Layout) -> bool:
    return stage == 3 and layout.state_ranks > 1


_GIB = 2**30
# Of tokens that arrive at a rank, beside what arrives where all experts are chosen equally often.
_UNEVEN = 1.25


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
    found = _Search(Searched(resolved(cfg)), limits or Limits()).run()
    return replace(found, seconds=time.monotonic() - began)


class _Search:
    """Goes through all layouts of a configuration's ranks."""

    def __init__(self, searched: Searched, limits: Limits) -> None:
        self._searched, self._limits = searched, limits
        self._refusals = Refusals()
        self._axes = Axes(searched, limits, self._refusals)
        self._ways = Ways(searched, limits, self._refusals)

    def run(self) -> Plan:
        """The plan, but for the seconds that it took."""
        best: dict[tuple[Any, ...], LayoutCandidate] = {}
        for candidate in self._candidates():
            key = (candidate.strategy, candidate.layout, candidate.work.stage)
            known = best.get(key)
            if known is None or candidate.samples_per_second > known.samples_per_second:
                best[key] = candidate
        ranked = sorted(best.values(), key=lambda each: -each.samples_per_second)
        ranked = [replace(each, overrides=overrides_of(self._searched, each)) for each in ranked]
        cfg = self._searched.cfg
        return Plan(
            name=cfg.name,
            world_size=self._searched.world_size,
            profile=self._searched.profile,
            precision=cfg.precision,
            global_batch_size=cfg.global_batch_size,
            ranked=tuple(ranked),
            refused=self._refusals.beside({each.title for each in ranked}),
            parameters=self._searched.parameters,
            notes=tuple(self._notes(ranked[0])) if ranked else (),
            considered=self._ways.considered,
        )

    def _candidates(self) -> Iterator[LayoutCandidate]:
        world = self._searched.world_size
        for tensor in self._axes.tensors():
            sequence = self._axes.splits_sequence(tensor)
            for context in self._axes.contexts(world // tensor, tensor, sequence):
                cut = self._axes.cut(tensor, context, sequence)
                if cut is None:
                    continue
                for pipeline in self._axes.pipelines(world // (tensor * context)):
                    yield from self._with_data(cut, pipeline, world // (tensor * context * pipeline))

    def _with_data(self, cut: ModelCut, pipeline: int, data: int) -> Iterator[LayoutCandidate]:
        """Candidates that leave so many ranks to the data axes."""
        whole = Layout(pipeline=pipeline, replicate=data, context=cut.context, tensor=cut.tensor)
        batch = self._searched.cfg.global_batch_size
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
                        found = self._ways.fastest(strategy, stage, layout, way, samples)
                        yield from [found] if found is not None else []

    def _shards(self, layout: Layout) -> list[int]:
        """Sizes of the shard axis among the data ranks of a layout, one that was decided on included."""
        data, axes = layout.data_ranks, self._limits.axes
        node = max(self._searched.profile.devices_per_node // (layout.tensor * layout.context), 1)
        given = axes.get("shard") or data // axes.get("replicate", data)
        return sorted({*shards_of(data, node), *([given] if given and data % given == 0 else [])})

    def _refuse_batch(self, layout: Layout, batch: int) -> None:
        """A batch that its data ranks cannot share, in the words of a run."""
        strategy = "hybrid" if cuts_module(layout) else "ddp"
        try:
            solve_accumulation(batch, 1, layout.data_ranks)
        except ValueError as error:
            overrides = (*overrides_of_layout(strategy, layout, 1), "micro_batch_size=1")
            self._refusals.add(describe_data(layout), "batch", str(error), overrides)

    def _notes(self, best: LayoutCandidate) -> Iterator[str]:
        """What a plan takes for granted."""
        if best.layout.expert == 1:
            return
        more = replace(best.cut, routing=Routing(received=_UNEVEN, computed=_UNEVEN))
        even, uneven = (
            self._searched.held(best.work, self._searched.facts.near(cut)).total for cut in (best.cut, more)
        )
        yield (
            "experts are taken to be chosen evenly by the tokens of all ranks; a rank to which "
            f"{100 * (_UNEVEN - 1):.0f} % more travels than to the mean needs {max(uneven - even, 0) / _GIB:.2f} GiB "
            "more in the first layout (seen in a run: rank_imbalance)"
        )
