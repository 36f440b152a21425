"""The engines that cut one module along the axes of a layout, put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from trainwright.core.layout import Layout
from trainwright.strategies.base.whole.parts import Share, find_slots
from trainwright.strategies.base.whole.watch import PartsWatch
from trainwright.strategies.compose.engine_options import EngineOptions
from trainwright.strategies.compose.model_plan import plan_for
from trainwright.strategies.compose.parts.uncut import Uncut
from trainwright.strategies.context.engine import ContextParallel, validate_context
from trainwright.strategies.context.proof import sequence_problems
from trainwright.strategies.contract.cuts import Cut
from trainwright.strategies.contract.gradients import GradientScope
from trainwright.strategies.contract.groups import LayoutGroups
from trainwright.strategies.data.sharding.gradient_hooks import refuse_hook
from trainwright.strategies.expert.engine import Dispatcher, ExpertParallel, validate_experts
from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.engine import PipelineEngine, Run
from trainwright.strategies.pipeline.schedules import (
    ranks_of_stages,
    split_blocks,
    validate_pipeline,
)
from trainwright.strategies.pipeline.stage import OwnForwardStage
from trainwright.strategies.plan.blocks import count_parameters
from trainwright.strategies.plan.model_plan import ModelPlan
from trainwright.strategies.tensor.engine import TensorParallel, validate_tensor


def problems_of(module: nn.Module, plan: ModelPlan, layout: Layout, options: EngineOptions) -> list[str]:
    """What makes ``layout`` impossible for ``module``; empty if nothing does. Needs no other process."""
    problems: list[str] = []
    if layout.pipeline > 1:
        problems += validate_pipeline(
            len(plan.blocks),
            layout.pipeline,
            options.schedule,
            options.micro_batches_for(layout.pipeline),
            options.stages_per_rank,
            None if options.split == "balanced" else options.split,
        )
    if layout.tensor > 1:
        problems += validate_tensor(
            module,
            plan,
            layout.tensor,
            sequence_parallel=options.sequence_parallel,
            loss_parallel=options.loss_parallel,
        )
    if layout.expert > 1:
        problems += validate_experts(module, plan, layout.expert)
        listed = [name for name, style in plan.experts.items() if style == "listed"]
        if listed:
            problems.append(
                f"expert={layout.expert} with experts in a list of modules ({listed[0]}); allowed are experts "
                "stacked in parameters with one row each, as Hugging Face's and those of recipe=moe. Stack them, or "
                "use expert=1"
            )
    if layout.context > 1:
        found = validate_context(module, plan, layout.context, options.attention, layout.tensor)
        problems += found or sequence_problems(module, plan, layout.context, options.attention)  # type: ignore[arg-type]
    return problems


class Engines(Uncut):
    """What is done to one module so that this rank runs its part of it.

    Args:
        module: the user's module, whole (its tensors may be on the meta device).
        layout: a closed layout.
        groups: of the layout.
        options: how to cut.
        device: of this rank.

    Attributes:
        cuts: name of a parameter -> how it is cut along the tensor or expert axis.
        owners: name of a parameter or buffer -> index of its first holder along the pipeline axis; empty without one.
        expert_parameters: parameters of which ranks of the expert axis hold different parts.

    Raises:
        ValueError: if the module cannot be cut so; the message lists every problem.
    """

    def __init__(
        self,
        module: LightningModule,
        layout: Layout,
        groups: LayoutGroups,
        options: EngineOptions,
        device: torch.device,
    ) -> None:
        self.module: LightningModule = module
        self.is_cut = True
        self.num_parameters = count_parameters(module)
        self.plan = plan_for(module, layout, options)
        problems = problems_of(module, self.plan, layout, options)
        if problems:
            raise ValueError(f"The layout {layout} is impossible for {type(module).__name__}: " + "; ".join(problems))
        self._layout, self._groups, self._options, self._device = layout, groups, options, device
        self._place = layout.coordinates(dist.get_rank())
        self.cuts: dict[str, Cut] = {}
        self.owners: dict[str, int] = {}
        self._cut_places: dict[tuple[int, str], Cut] = {}
        self._expert_names: frozenset[str] = frozenset()
        self._spans: list[range] = [range(len(self.plan.blocks))]
        self._my_stages = [0]
        self._stage_ranks = [0]
        self._pipeline_cut: PipelineCut | None = None
        self._pipeline: PipelineEngine | None = None
        self._tensor: TensorParallel | None = None
        self._expert: ExpertParallel | None = None

    # ---- cutting --------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Cut the module: parameters that other ranks hold go, forwards are exchanged. Once per module."""
        tensor, expert = self._groups.along("tensor"), self._groups.along("expert")
        if tensor is not None:
            self._tensor = TensorParallel(
                self.module,
                self.plan,
                tensor,
                sequence_parallel=self._options.sequence_parallel,
                loss_parallel=self._options.loss_parallel,
            )
            self.cuts.update(self._tensor.cuts)
        if expert is not None:
            self._expert = ExpertParallel(self.module, self.plan, expert)
            self.cuts.update(self._expert.cuts)
            self._expert_names = frozenset(self._expert.held())
        if self._layout.pipeline > 1:
            self._cut_pipeline()
        self._exchange_parameters(self.module)
        first, last = self._holds_block(0), self._holds_block(len(self.plan.blocks) - 1)
        if self._tensor is not None:
            self._tensor.apply(self._block(0) if first else None, self._block(-1) if last else None)
        if self._expert is not None:
            self._expert.apply()
        context = self._groups.along("context")
        if context is not None:
            ContextParallel(
                self.module,
                list(self.owned_blocks.values()),
                context,
                method=self._options.attention,  # type: ignore[arg-type]
                balance=self._options.balance,
                enters=first,
                leaves=last,
                # The tensor axis' own functions on the head and norm know nothing of rows that are elsewhere.
                split_outputs=self._tensor is None,
                first=None if first else self._block(0),
                further=self._further_slices,
            ).apply()

    def _further_slices(self) -> int:
        return self._layout.tensor if self._tensor is not None and self._tensor.slices_sequence else 1

    def _cut_pipeline(self) -> None:
        pipeline, stages = self._layout.pipeline, self._options.stages(self._layout.pipeline)
        self._spans = stage_spans(self.module, self.plan, stages, self._options.split)
        self._stage_ranks = ranks_of_stages(pipeline, stages, self._options.schedule)
        self._my_stages = [s for s, rank in enumerate(self._stage_ranks) if rank == self._place["pipeline"]]
        keys = list(self.module.state_dict())
        cut = self._pipeline_cut = PipelineCut(self.module, self.plan, self._spans, self._my_stages)
        for name, holders in cut.holders.items():
            self.owners[name] = self._stage_ranks[holders[0]]
        for key in keys:
            self.owners.setdefault(key, self._stage_ranks[cut.buffer_stages.get(key, 0)])
        cut.apply(self._device)

    def _exchange_parameters(self, module: nn.Module) -> None:
        """Keep this rank's part of every parameter that is cut; meta ones are cut when they get their values."""
        real: dict[Tensor, nn.Parameter] = {}
        for name, cut in self.cuts.items():
            path, _, own = name.rpartition(".")
            owner = module.get_submodule(path)
            self._cut_places[id(owner), own] = cut
            parameter = owner._parameters.get(own)
            if parameter is None or parameter.is_meta:
                continue
            if parameter not in real:
                refuse_hook(name, parameter)
                real[parameter] = nn.Parameter(cut.part(parameter.detach()), requires_grad=parameter.requires_grad)
            owner._parameters[own] = real[parameter]

    def place_ghosts(self, dtype_of: Callable[[Tensor], torch.dtype]) -> None:
        """Give what stands for other stages' parameters this rank's device and the dtype that parameters get."""
        if self._pipeline_cut is not None:
            self._pipeline_cut.place_ghosts(self._device, dtype_of)

    def cut_copy(self, copy: nn.Module) -> None:
        """Leave of a whole copy of the module, which never runs, what this rank holds of the module itself."""
        held = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        for name, _ in list(copy.named_parameters(remove_duplicate=False)):
            if name not in held:
                path, _, own = name.rpartition(".")
                copy.get_submodule(path)._parameters.pop(own)
        self._exchange_parameters(copy)

    def cut_of(self, owner: nn.Module, name: str) -> Cut | None:
        """How the parameter ``name`` of the submodule ``owner`` is cut; ``None``: not at all."""
        return self._cut_places.get((id(owner), name))

    def holds(self, name: str) -> bool:
        """Whether the submodule ``name`` is not within a block of another stage."""
        return not any(name == block or name.startswith(f"{block}.") for block in self._skipped_blocks())

    def _skipped_blocks(self) -> Iterator[str]:
        for index, name in enumerate(self.plan.blocks):
            if not self._holds_block(index):
                yield name

    def _holds_block(self, index: int) -> bool:
        return any(index in self._spans[stage] for stage in self._my_stages)

    def _block(self, index: int) -> nn.Module:
        return self.module.get_submodule(self.plan.blocks[index])

    @property
    def owned_blocks(self) -> dict[str, nn.Module]:
        """Blocks of this rank by name, in order."""
        return {
            name: self.module.get_submodule(name)
            for index, name in enumerate(self.plan.blocks)
            if self._holds_block(index)
        }

    # ---- what is where --------------------------------------------------------------------------------------------

    def _parameters(self, names: frozenset[str]) -> list[nn.Parameter]:
        return [parameter for name, parameter in self.module.named_parameters() if name in names]

    @property
    def expert_parameters(self) -> set[nn.Parameter]:
        """Parameters of experts, of which other ranks of the expert axis hold other parts."""
        return set(self._parameters(self._expert_names))

    @property
    def dispatchers(self) -> tuple[Dispatcher, ...]:
        """What exchanges tokens with ranks that have other experts, one for each layer of experts."""
        return () if self._expert is None else self._expert.dispatchers

    def routing_balance(self) -> dict[str, float]:
        """How evenly tokens went to experts since the last call; empty without an expert axis."""
        return {} if self._expert is None else self._expert.statistics()

    def expert_modules_in(self, block: nn.Module) -> list[nn.Module]:
        """Modules of ``block`` that hold parameters of experts only; none without an expert axis."""
        if self._layout.expert == 1:
            return []
        inside = {id(sub) for sub in block.modules()}
        modules = (self.module.get_submodule(name) for name in self.plan.experts)
        return [module for module in modules if id(module) in inside]

    def gradient_scope(self, source: Mapping[int, Tensor]) -> GradientScope:
        """Over which ranks gradients are spread, for the parameters as they are now.

        Args:
            source: id of what an optimizer holds in place of a parameter -> the parameter.
        """
        named = dict(self.module.named_parameters())
        groups = {id(p): (self.cuts[name].group,) for name, p in named.items() if name in self.cuts}
        copies = {id(p) for name, p in named.items() if self._is_copy(name)}
        origin = {held: id(parameter) for held, parameter in source.items()}
        return GradientScope(
            lambda tensor: groups.get(origin.get(id(tensor), id(tensor)), ()),
            lambda tensor: origin.get(id(tensor), id(tensor)) not in copies,
            self._groups.along("pipeline"),
        )

    def parts_of(self, name: str) -> int:
        """Over how many ranks of the tensor, expert and pipeline axes a parameter is spread; 0 for a copy on a stage.

        Stages hold different parameters: each counts its own as the part that they are of all.
        """
        if self._is_copy(name):
            return 0
        cut = self.cuts.get(name)
        return self._layout.pipeline * (1 if cut is None else cut.group.size())

    def _is_copy(self, name: str) -> bool:
        return self.owners.get(name, self._place["pipeline"]) != self._place["pipeline"]

    def shared_parameters(self) -> dict[dist.ProcessGroup, list[nn.Parameter]]:
        """Parameters whose gradients several ranks hold parts of a sum of, by the group of these ranks."""
        shared: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
        if self._tensor is not None and self._tensor.summed:
            tensor = self._groups.along("tensor")
            assert tensor is not None
            shared[tensor] = self._parameters(self._tensor.summed)
        for name, places in self._tied_places().items():
            lines = [[line[place] for place in places] for line in self._layout.groups("pipeline")]
            group = self._groups.of(lines)
            if group is not None:
                shared.setdefault(group, []).append(self.module.get_parameter(name))
        return shared

    def kin_of(self, name: str) -> str:
        """What must be averaged over replicas apart from the rest, so that ranks with copies of it get the same.

        Ranks of the tensor axis hold copies of what is not cut beside different parts of what is; stages of a pipeline
        hold copies of tied parameters beside different blocks.
        """
        if name in self._tied_places():
            return name
        return "cut" if self._tensor is not None and name in self.cuts else ""

    def _tied_places(self) -> dict[str, tuple[int, ...]]:
        """Names of parameters that several ranks of a pipeline hold -> their places in it."""
        if self._pipeline_cut is None:
            return {}
        places = {n: tuple(sorted({self._stage_ranks[s] for s in h})) for n, h in self._pipeline_cut.holders.items()}
        return {name: at for name, at in places.items() if len(at) > 1}

    def shares(self, held: Mapping[str, Share], names: Iterable[str]) -> dict[str, Share]:
        """Return what this rank holds of each parameter of the whole module.

        Args:
            held: what is registered here, by name, without regard to how it is cut.
            names: of all parameters, in order.
        """
        found = {}
        for name in names:
            cut, pipeline = self.cuts.get(name), self._pipeline_cut
            if name not in held:
                assert pipeline is not None
                ghost = pipeline.ghosts[name]
                found[name] = Share(pipeline.slots(name), ghost.shape, ghost, is_held=False, cut=cut)
                continue
            share = held[name]
            shape = share.shape if cut is None else cut.whole_shape(share.shape)
            slots = share.slots if pipeline is None else pipeline.slots(name)
            found[name] = Share(slots, shape, share.part, cut=cut)
        return found

    def parts_watch(self) -> PartsWatch | None:
        """Return what refuses uses of parts outside of their modules; ``None``: nothing is cut."""
        if not self.cuts or any(module._compiled_call_impl is not None for module in self.module.modules()):
            return None  # compiled code would be traced with it
        slots = find_slots(self.module)
        named = {name: p for name, p in self.module.named_parameters() if name in self.cuts}
        parts = {name: (slots[id(p)], self.cuts[name]) for name, p in named.items()}
        owners = {owner for places, _ in parts.values() for owner, _ in places}
        attentions = {m for m in self.module.modules() if isinstance(m, nn.MultiheadAttention) and m.out_proj in owners}
        axes = [axis for axis in ("tensor", "expert") if getattr(self._layout, axis) > 1]
        return PartsWatch(parts, [*owners, *attentions], "use " + " and ".join(f"{axis}=1" for axis in axes))

    # ---- running --------------------------------------------------------------------------------------------------

    @property
    def has_pipeline(self) -> bool:
        """Whether the module is cut into stages."""
        return self._pipeline_cut is not None

    @property
    def pipeline_stages(self) -> list[OwnForwardStage]:
        """The stages of this rank; none without a pipeline."""
        return [] if self._pipeline is None else self._pipeline.stages

    def attach(self, run: Run, look: Run, whole: Callable[[str], Tensor]) -> PipelineEngine:
        """Connect the pipeline, after everything else has put its hooks on the module.

        Args:
            run: runs a method of the module on one micro-batch.
            look: as ``run``, without gradients and on all stages together.
            whole: value of a parameter of this stage, whole along the data axes; a collective of its data ranks.
        """
        assert self._pipeline_cut is not None
        self.detach()
        group = self._groups.along("pipeline")
        assert group is not None
        self._pipeline = PipelineEngine(
            self.module,
            self._pipeline_cut,
            group=group,
            schedule=self._options.schedule,
            micro_batches=self._options.micro_batches_for(self._layout.pipeline),
            device=self._device,
            run=run,
            look=look,
            whole=whole,
            batch_dims=self._options.batch_dims,
        )
        self._pipeline.attach()
        return self._pipeline

    def refresh(self) -> None:
        """Let stages say anew what they send, as what is trained may have changed; on all ranks between two steps."""
        if self._pipeline is not None:
            self._pipeline.refresh()

    def registered_ghosts(self) -> AbstractContextManager[set[nn.Parameter]]:
        """Within it all parameters of the module are registered; gives those that this rank does not hold."""
        return nullcontext(set()) if self._pipeline_cut is None else self._pipeline_cut.registered_ghosts()

    def share_buffers(self) -> None:
        """Have every rank of a pipeline know the buffers of all stages. A collective."""
        if self._pipeline is not None:
            self._pipeline.share_buffers()

    def detach(self) -> None:
        """Let go of the pipeline; the module stays cut."""
        if self._pipeline is not None:
            self._pipeline.detach()
        self._pipeline = None

    def guard(self, function: Callable[[], Any]) -> Any:
        """Call ``function``, which runs the user's step, as far as this stage goes."""
        return function() if self._pipeline is None else self._pipeline.call(function)

    def micro_batches_of(self, batch: Any) -> list[tuple[Any, float]]:
        """The micro-batches of a batch, and the share of its samples in each."""
        assert self._pipeline is not None
        return self._pipeline.micro_batches_of(batch)


def stage_spans(module: nn.Module, plan: ModelPlan, stages: int, split: str | tuple[int, ...]) -> list[range]:
    """Blocks of each stage.

    Args:
        module: whole.
        plan: its blocks.
        stages: how many.
        split: blocks per stage, or ``"balanced"``: by their number of parameters.
    """
    if split == "balanced":
        return split_blocks([float(count_parameters(module.get_submodule(name))) for name in plan.blocks], stages)
    return _spans_of(split)


def _spans_of(split: str | tuple[int, ...]) -> list[range]:
    assert not isinstance(split, str)
    ends = [sum(split[: index + 1]) for index in range(len(split))]
    return [range(end - size, end) for end, size in zip(ends, split, strict=True)]
