"""What travels between stages besides the output of the block before: learned once, from the first batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.first_step.block_values import Places, placeholder
from trainwright.strategies.pipeline.first_step.survey import Source, Survey, explain
from trainwright.strategies.pipeline.form import Form


@dataclass(frozen=True)
class StageRoutes:
    """Which values of blocks, and which parameters, each stage gets from the ones before.

    Args:
        cut: of the module.
        needs: for each stage, what it needs and does not compute or hold itself.
        forms: of each block's value; empty if nothing but outputs travels.
        places: where each block leaves tensors besides its output.
        cloned: values that the step changes in place, so that what travels must be a copy; ``True``: at once.
    """

    cut: PipelineCut
    needs: Sequence[frozenset[Source]]
    forms: Sequence[Form] = ()
    places: Sequence[Places] = ()
    cloned: Mapping[Source, bool] = field(default_factory=dict)
    _stand_ins: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def sent(self) -> list[tuple[Source, ...]]:
        """For each stage, what it sends on besides its output, in order."""
        return [
            tuple(
                sorted(
                    source
                    for source in frozenset[Source]().union(*self.needs[stage + 1 :])
                    if any(
                        source in self.needs[later] and self.origin(source, later) <= stage
                        for later in range(stage + 1, self.cut.stages)
                    )
                )
            )
            for stage in range(self.cut.stages)
        ]

    def origin(self, source: Source, stage: int) -> int:
        """The stage that has it first, of those from which it comes to ``stage``."""
        if source.kind == "block":
            return self.cut.stage_of_block(source.block)
        return max(holder for holder in self.cut.holders[source.name] if holder < stage)

    @cached_property
    def kept(self) -> frozenset[int]:
        """Blocks of whose values more than the output is kept for later stages."""
        return frozenset(source.block for sent in self.sent for source in sent if source.kind == "block")

    @cached_property
    def copied(self) -> frozenset[int]:
        """Blocks whose output is changed in place before the next block is called."""
        return frozenset(source.block for source, at_once in self.cloned.items() if at_once)

    @cached_property
    def rebuilt(self) -> list[frozenset[int]]:
        """For each stage, the skipped blocks for whose value the output that arrives cannot stand."""
        changed = {source.block for source in self.cloned}
        more = {block for block, form in enumerate(self.forms) if form.spec.num_leaves > self.outputs(block)}
        arriving = [{source.block for source in sent} for sent in ((), *self.sent)]
        return [
            frozenset(more | ((changed | arriving[stage]) - {span.start - 1}))
            for stage, span in enumerate(self.cut.spans)
        ]

    def stand_in(self, tensor: Tensor) -> Tensor:
        """What stands for the output of a skipped block, as large as ``tensor``."""
        if tensor.numel() == 1:  # may be written to
            return placeholder(tensor.shape, tensor.dtype, tensor.device)
        key = tensor.shape, tensor.dtype, tensor.device
        if key not in self._stand_ins:
            self._stand_ins[key] = placeholder(*key)
        return self._stand_ins[key]

    def outputs(self, block: int) -> int:
        """How many leaves the output of a block has; they come first in its value."""
        leaves: int = self.forms[block].spec.child(0).num_leaves
        return leaves

    def tensors_of_output(self, block: int) -> int:
        """How many tensors are among them."""
        return sum(self.forms[block].is_tensor[: self.outputs(block)])


def plan_routes(
    cut: PipelineCut,
    ranks: Sequence[int],
    survey: Survey,
    found: Sequence[tuple[Sequence[set[Source]], Mapping[Source, bool]]],
    forms: Sequence[Form],
    places: Sequence[Places],
) -> tuple[StageRoutes, list[str]]:
    """The routes, and why some of what is needed cannot travel.

    Args:
        cut, survey, forms, places: of this rank's run of the step.
        ranks: rank of each stage; one that holds a parameter for a stage holds it for all of its stages.
        found: of each rank of the pipeline: the needs of all stages, and what was changed in place.
    """
    problems: list[str] = []
    needs = [frozenset(s for other, _ in found for s in other[stage]) for stage in range(cut.stages)]
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
                problems.append(_partial(source.name))
            elif source.kind == "parameter" and stage not in cut.holders[source.name]:
                cut.used_outside.add(source.name)
                if ranks[stage] in {ranks[holder] for holder in cut.holders[source.name]}:
                    cut.hold_also(source.name, stage)
                elif min(cut.holders[source.name]) > stage:
                    problems.append(explain(cut, source.name, survey, stage))
                else:
                    kept.add(source)
            elif source.kind == "inside" and source.block not in cut.spans[stage]:
                problems.append(_side_door(cut, source.block))
            elif source.kind == "block" and source.block < cut.spans[stage].start:
                is_output = source.leaf < routes.tensors_of_output(source.block)
                if source.block != cut.spans[stage].start - 1 or not is_output:
                    kept.add(source)
        wanted.append(frozenset(kept | _uneven(routes, stage)))
    return StageRoutes(cut, wanted, forms, places, cloned), list(dict.fromkeys(problems))


def needs_everything(routes: StageRoutes, survey: Survey) -> bool:
    """Whether a whole run on every rank needs more than what each next stage is given and the last block's output.

    Args:
        routes: with forms and places of all blocks.
        survey: of the run.
    """
    last = len(routes.cut.blocks) - 1

    def is_known(source: Source, stage: int | None) -> bool:
        if source.kind != "block":
            return True
        known = {last} if stage is None else {last, *routes.cut.spans[stage], routes.cut.spans[stage].start - 1}
        return source.block in known and source.leaf < routes.tensors_of_output(source.block)

    return any(places.hooked for places in routes.places) or not all(
        is_known(source, stage)
        for stage, sources in [*enumerate(survey.needs), (None, survey.results)]
        for source in sources
    )


def _uneven(routes: StageRoutes, stage: int) -> set[Source]:
    """Outputs of skipped blocks for which the output that arrives cannot stand, as it has another structure."""
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


def _partial(name: str) -> str:
    return (
        f"The parameter {name!r} is used outside of its block, by code that sees only the parameters of this rank's "
        f"stage of the pipeline (a penalty over self.parameters(), say), so the result would leave out the others. Use "
        f"the optimizer's weight_decay, or pipeline=1."
    )


def _side_door(cut: PipelineCut, block: int) -> str:
    return (
        f"training_step uses a tensor that the block {cut.names[block]!r} computes but neither returns nor keeps as an "
        f"attribute of one of its modules (it is put into a list or an object that is shared, say). Other stages of "
        f"the pipeline cannot have it: return it from the block, set it as an attribute (self.aux_loss = ...), or use "
        f"pipeline=1."
    )
