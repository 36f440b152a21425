"""Which layouts are possible, what each would need and take, and which is fastest.

Axes are enumerated as divisors of the number of ranks. What the strategies refuse is refused here with their own words:
each axis is held against the module by the very checks that a run goes through, once for all layouts that share it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from trainwright.core.config.missing import resolved
from trainwright.core.global_batch import solve_accumulation
from trainwright.core.layout import Layout
from trainwright.planning.model.experts import Routing
from trainwright.planning.search.axes import Axes
from trainwright.planning.search.limits import Limits
from trainwright.planning.search.overrides import overrides_of, overrides_of_layout
from trainwright.planning.search.plan import LayoutCandidate, Plan, describe_data
from trainwright.planning.search.refusals import Refusals
from trainwright.planning.search.searched import Searched
from trainwright.planning.search.sizes import shards_of, strategies_for
from trainwright.planning.search.ways import Ways
from trainwright.planning.time.cost import ModelCut
from trainwright.strategies.compose.rules import cuts_module

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
