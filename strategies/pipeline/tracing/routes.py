"""Values sent between stages besides block outputs, determined once from the first batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.tracing.absent import partial_use
from trainwright.strategies.pipeline.tracing.block_values import SideOutputs
from trainwright.strategies.pipeline.tracing.dependency_trace import DependencyTrace, Source, explain
from trainwright.strategies.pipeline.value_spec import ValueSpec


@dataclass(frozen=True)
class StageRoutes:
    """Block values and parameters that each stage receives from earlier ones.

    Args:
        cut: of the module.
        needs: for each stage, and at the end for the code after the blocks by itself, the values that it needs and
            does not compute or hold itself.
        forms: of each block's value; empty if only outputs are sent.
        places: side outputs of each block.
        cloned: values that the step changes in place, so that copies must be sent; ``True``: changed before the next
            block.
    """

    cut: PipelineCut
    needs: Sequence[frozenset[Source]]
    forms: Sequence[ValueSpec] = ()
    places: Sequence[SideOutputs] = ()
    cloned: Mapping[Source, bool] = field(default_factory=dict)

    @cached_property
    def sent(self) -> list[tuple[Source, ...]]:
        """For each stage, the values that it sends besides its output, in order."""
        return [
            tuple(
                sorted(
                    source
                    for source in frozenset[Source]().union(*self.needs[stage + 1 :])
                    if any(
                        source in self.needs[later] and self.origin(source, later) <= stage
                        for later in range(stage + 1, len(self.needs))
                    )
                )
            )
            for stage in range(self.cut.stages)
        ]

    def origin(self, source: Source, stage: int) -> int:
        """Return the stage that has a value first, among those it can be sent from to ``stage``."""
        if source.kind == "block":
            return self.cut.stage_of_block(source.block)
        return max(holder for holder in self.cut.holders[source.name] if holder < stage)

    @cached_property
    def kept(self) -> frozenset[int]:
        """Blocks with values beyond the output that later stages need."""
        return frozenset(source.block for sent in self.sent for source in sent if source.kind == "block")

    @cached_property
    def copied(self) -> frozenset[int]:
        """Blocks whose output is changed in place before the next block is called."""
        return frozenset(source.block for source, at_once in self.cloned.items() if at_once)

    @cached_property
    def rebuilt(self) -> list[frozenset[int]]:
        """For each stage, the skipped blocks whose value differs from the received output."""
        changed = {source.block for source in self.cloned}
        more = {block for block, form in enumerate(self.forms) if form.spec.num_leaves > self.outputs(block)}
        arriving = [{source.block for source in sent} for sent in ((), *self.sent)]
        return [
            frozenset(more | ((changed | arriving[stage]) - {span.start - 1}))
            for stage, span in enumerate([*self.cut.spans, range(len(self.cut.names), len(self.cut.names))])
        ]

    def outputs(self, block: int) -> int:
        """Return the number of leaves of a block's output, which come first in its value."""
        return self.forms[block].spec.child(0).num_leaves

    def tensors_of_output(self, block: int) -> int:
        """Return the number of tensors in a block's output."""
        return sum(self.forms[block].is_tensor[: self.outputs(block)])


def plan_routes(
    cut: PipelineCut,
    ranks: Sequence[int],
    trace: DependencyTrace,
    found: Sequence[tuple[Sequence[set[Source]], Mapping[Source, bool]]],
    forms: Sequence[ValueSpec],
    places: Sequence[SideOutputs],
) -> tuple[StageRoutes, list[str]]:
    """Return the routes, and problems of values that cannot be sent.

    Args:
        cut, trace, forms, places: of this rank's trace of the step.
        ranks: rank of each stage; a parameter held for one stage is held for all stages of the rank.
        found: of each rank of the pipeline: needs of all stages and of the step's results, and in-place changes.
    """
    problems: list[str] = []
    *needs, results = [frozenset(s for other, _ in found for s in other[stage]) for stage in range(cut.stages + 1)]
    cloned: dict[Source, bool] = {}
    for _, mutated in found:
        for source, at_once in mutated.items():
            cloned[source] = cloned.get(source, False) or at_once
    routes = StageRoutes(cut, (), forms, places, cloned)
    wanted: list[frozenset[Source]] = []
    for stage, sources in enumerate(needs):
        kept = set()
        for source in sorted(sources):
            if source.kind == "parameter" and any(source not in other[stage] for other, _ in found):
                problems.append(partial_use(source.name))
            elif source.kind == "parameter" and stage not in cut.holders[source.name]:
                cut.used_outside.add(source.name)
                if ranks[stage] in {ranks[holder] for holder in cut.holders[source.name]}:
                    cut.hold_also(source.name, stage)
                elif min(cut.holders[source.name]) > stage:
                    problems.append(explain(cut, source.name, trace, stage))
                else:
                    kept.add(source)
            elif source.kind == "inside" and source.block not in cut.spans[stage]:
                problems.append(_hidden_output_problem(cut, source.block))
            elif source.kind == "block" and source.block < cut.spans[stage].start:
                is_output = source.leaf < routes.tensors_of_output(source.block)
                if source.block != cut.spans[stage].start - 1 or not is_output:
                    kept.add(source)
        wanted.append(frozenset(kept | _mismatched_outputs(routes, stage)))
    wanted.append(wanted[-1] | {source for source in results if _is_beside_output(cut, routes, source)})
    return StageRoutes(cut, wanted, forms, places, cloned), list(dict.fromkeys(problems))


def _is_beside_output(cut: PipelineCut, routes: StageRoutes, source: Source) -> bool:
    """Return whether code after the blocks gets a value of a block in another way than as the last one's output."""
    is_output = source.kind == "block" and source.leaf < routes.tensors_of_output(source.block)
    return source.kind == "block" and not (is_output and source.block == len(cut.names) - 1)


def needs_everything(routes: StageRoutes, trace: DependencyTrace) -> bool:
    """Return whether a full run on every rank needs more than each next stage's input and the last block's output.

    Args:
        routes: with forms and places of all blocks.
        trace: trace of the run.
    """
    last = len(routes.cut.blocks) - 1

    def is_known(source: Source, stage: int | None) -> bool:
        if source.kind != "block":
            return True
        known = {last} if stage is None else {last, *routes.cut.spans[stage], routes.cut.spans[stage].start - 1}
        return source.block in known and source.leaf < routes.tensors_of_output(source.block)

    return any(places.hooked for places in routes.places) or not all(
        is_known(source, stage)
        for stage, sources in [*enumerate(trace.needs), (None, trace.results)]
        for source in sources
    )


def _mismatched_outputs(routes: StageRoutes, stage: int) -> set[Source]:
    """Return outputs of skipped blocks whose structure differs from the received output."""
    start = routes.cut.spans[stage].start
    if start == 0:
        return set()
    before = routes.forms[start - 1].spec.child(0)
    return {
        Source("block", block=block, leaf=leaf)
        for block in range(start - 1)
        if routes.forms[block].spec.child(0) != before
        for leaf in range(routes.tensors_of_output(block))
    }


def _hidden_output_problem(cut: PipelineCut, block: int) -> str:
    return (
        f"training_step uses a tensor that the block {cut.names[block]!r} computes but neither returns nor keeps as an "
        "attribute of one of its modules (it may be put into a shared list or object). Other stages of the pipeline "
        "cannot access it: return it from the block, set it as an attribute (self.aux_loss = ...), or use pipeline=1."
    )
