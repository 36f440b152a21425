"""Ways to run a layout (micro-batches, schedules, activation checkpointing, offloading), and the fastest that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainwright.core.layout import Layout
from trainwright.planning.memory.peak import Held
from trainwright.planning.model.without_memory import FactsError
from trainwright.planning.search.limits import Limits
from trainwright.planning.search.overrides import overrides_of_layout
from trainwright.planning.search.plan import LayoutCandidate, describe, describe_data
from trainwright.planning.search.refusals import Refusals, too_large
from trainwright.planning.search.searched import Searched
from trainwright.planning.search.sizes import micro_batches_of
from trainwright.planning.search.work import Work
from trainwright.planning.time.cost import ModelCut, PassCost
from trainwright.strategies.compose.check_strategy import too_few_samples
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
            for checkpointing in self._limits.allowed("checkpointing", ways):
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
        parts = self._limits.parts
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
