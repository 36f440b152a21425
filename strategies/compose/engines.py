"""Engines that partition one module along the axes of a layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from trainwright.core.layout import Layout
from trainwright.core.problems import first_of
from trainwright.strategies.base.whole.parts import Share
from trainwright.strategies.base.whole.watch import PartsWatch
from trainwright.strategies.compose.engine_options import EngineOptions
from trainwright.strategies.compose.model_plan import plan_for
from trainwright.strategies.context.engine import ContextParallel, validate_context
from trainwright.strategies.context.proof import sequence_problems
from trainwright.strategies.contract.cuts import Cut
from trainwright.strategies.contract.gradients import GradientScope
from trainwright.strategies.contract.groups import LayoutGroups
from trainwright.strategies.contract.precision import named_dtype
from trainwright.strategies.contract.randomness.state import kept_random_state
from trainwright.strategies.data.sharding.gradient_hooks import refuse_hook
from trainwright.strategies.expert.engine import Dispatcher, ExpertParallel, validate_experts
from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.engine import PipelineEngine
from trainwright.strategies.pipeline.schedules import block_problems, ranks_of_stages, split_blocks
from trainwright.strategies.pipeline.stage import UserStepStage
from trainwright.strategies.pipeline.training import Steps
from trainwright.strategies.plan.blocks import COMPILE_BLOCKS, compiled_modules, count_parameters
from trainwright.strategies.plan.model_plan import ModelPlan
from trainwright.strategies.plan.names import within
from trainwright.strategies.plan.slots import find_slots
from trainwright.strategies.plan.tensor_rules import validate_tensor
from trainwright.strategies.tensor.engine import TensorParallel


def problems_of(module: nn.Module, plan: ModelPlan, layout: Layout, options: EngineOptions) -> list[str]:
    """Return why ``layout`` is impossible for ``module``. Needs no process group."""
    problems = _compiled_problems(module, plan, layout)
    if problems:
        return problems
    if layout.pipeline > 1:
        split = None if options.split == "balanced" else options.split
        problems += block_problems(len(plan.blocks), layout.pipeline, options.schedule, options.stages_per_rank, split)
    if layout.tensor > 1:
        problems += validate_tensor(module, plan, layout.tensor, loss_parallel=options.loss_parallel)
    if layout.expert > 1:
        problems += validate_experts(module, plan, layout.expert)
    if layout.context > 1:
        found = validate_context(module, plan, layout.context, options.attention, layout.tensor)
        problems += found or sequence_problems(module, plan, layout.context, options.attention)  # type: ignore[arg-type]
    return problems


def _compiled_problems(module: nn.Module, plan: ModelPlan, layout: Layout) -> list[str]:
    """Return what is wrong with modules that the user has compiled."""
    compiled = compiled_modules(module)
    if layout.context == 1:  # a pipeline runs each block by itself, compiled or not
        compiled = [n for n in compiled if layout.pipeline > 1 and any(n != b and within(b, n) for b in plan.blocks)]
    named = f"{compiled[0]!r}" if compiled and compiled[0] else "the module"
    return [f"{named} is compiled, which hides its blocks from this layout. {COMPILE_BLOCKS}"] if compiled else []


class Engines:
    """Partitioning of one module, so that this rank runs its part of it; of no module, unless created by :meth:`of`.

    Attributes:
        module: the partitioned module; ``None``: each rank runs all of its module.
        plan: of the module.
        num_parameters: elements of all parameters of the whole module; 0: unknown.
        cuts: parameter name -> split along the tensor or expert axis.
        owners: parameter or buffer name -> index of its first pipeline rank; empty without a pipeline.
        expert_parameters: parameters that differ along the expert axis.
    """

    def __init__(self) -> None:
        self.module: Any = None
        self.is_cut = False
        self.num_parameters = 0
        self.plan = ModelPlan()
        self._layout, self._options = Layout(), EngineOptions()
        self._place = self._layout.coordinates(0)
        self._groups: LayoutGroups
        self._device: torch.device
        self.cuts: dict[str, Cut] = {}
        self.owners: dict[str, int] = {}
        self._cut_places: dict[tuple[int, str], Cut] = {}
        self._expert_names: frozenset[str] = frozenset()
        self._spans: list[range] = []
        self._my_stages = [0]
        self._stage_ranks = [0]
        self._pipeline_cut: PipelineCut | None = None
        self._pipeline: PipelineEngine | None = None
        self._tensor: TensorParallel | None = None
        self._expert: ExpertParallel | None = None
        self._context: ContextParallel | None = None

    @classmethod
    def of(
        cls, module: LightningModule, layout: Layout, groups: LayoutGroups, options: EngineOptions, device: torch.device
    ) -> Engines:
        """Plan the partitioning of a module.

        Args:
            module: the user's module, whole; may be on the meta device.
            layout: closed.
            groups: of the layout.
            options: of the engines.
            device: of this rank.

        Raises:
            ValueError: if the module cannot be partitioned so; with the first problem.
        """
        with kept_random_state(device):  # proofs draw inputs
            made, plan = cls(), plan_for(module, layout, options)
            problems = problems_of(module, plan, layout, options)
        if problems:
            raise ValueError(f"The layout {layout} is impossible for {type(module).__name__}: " + first_of(problems))
        made.module, made.is_cut, made.plan = module, True, plan
        made.num_parameters = count_parameters(module)
        made._layout, made._groups, made._options, made._device = layout, groups, options, device
        made._place = layout.coordinates(dist.get_rank())
        made._spans = [range(len(plan.blocks))]
        return made

    # ---- partitioning ----------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Partition the module: drop parameters of other ranks and add the exchanges. Once per module."""
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
            self._expert_names = frozenset(self._expert.cuts)
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
            self._context = ContextParallel(
                self.module,
                list(self.owned_blocks.values()),
                context,
                method=self._options.attention,  # type: ignore[arg-type]
                balance=self._options.balance,
                enters=first,
                leaves=last,
                # Tensor parallelism's own head and norm functions do not support rows on other ranks.
                split_outputs=self._tensor is None,
                first=None if first else self._block(0),
                further=self._further_slices,
            )
            self._context.apply()

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
        """Replace each split parameter by its local part; meta parameters are split when materialized."""
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
        """Set the device and dtype of placeholders for other stages' parameters."""
        if self._pipeline_cut is not None:
            self._pipeline_cut.place_ghosts(self._device, dtype_of)

    def cut_copy(self, copy: nn.Module) -> None:
        """Reduce a whole copy of the module that never runs to the parameters of this rank."""
        held = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        for name, _ in list(copy.named_parameters(remove_duplicate=False)):
            if name not in held:
                path, _, own = name.rpartition(".")
                copy.get_submodule(path)._parameters.pop(own)
        self._exchange_parameters(copy)

    def cut_of(self, owner: nn.Module, name: str) -> Cut | None:
        """Return the split of a parameter of the submodule ``owner``; ``None``: not split."""
        return self._cut_places.get((id(owner), name))

    def holds(self, name: str) -> bool:
        """Return whether the submodule ``name`` is outside of other stages' blocks."""
        blocks = enumerate(self.plan.blocks)
        return all(self._holds_block(index) or not within(name, block) for index, block in blocks)

    def _holds_block(self, index: int) -> bool:
        return any(index in self._spans[stage] for stage in self._my_stages)

    def _block(self, index: int) -> nn.Module:
        block: nn.Module = self.module.get_submodule(self.plan.blocks[index])
        return block

    @property
    def owned_blocks(self) -> dict[str, nn.Module]:
        """This rank's blocks by name, in order."""
        return {
            name: self.module.get_submodule(name)
            for index, name in enumerate(self.plan.blocks)
            if self._holds_block(index)
        }

    # ---- queries ----------------------------------------------------------------------------------------------------

    def _parameters(self, names: frozenset[str]) -> list[nn.Parameter]:
        return [p for name, p in self.module.named_parameters() if name in names] if names else []

    @property
    def expert_parameters(self) -> set[nn.Parameter]:
        """Parameters of experts, which differ along the expert axis."""
        return set(self._parameters(self._expert_names))

    @property
    def dispatchers(self) -> tuple[Dispatcher, ...]:
        """Token dispatchers, one per expert layer."""
        return () if self._expert is None else self._expert.dispatchers

    def routing_balance(self) -> dict[str, float]:
        """Return how evenly tokens were routed since the last call; empty without an expert axis."""
        return {} if self._expert is None else self._expert.statistics()

    def expert_modules_in(self, block: nn.Module) -> list[nn.Module]:
        """Return the modules of ``block`` that hold expert parameters only; none without an expert axis."""
        if self._layout.expert == 1:
            return []
        inside = {id(sub) for sub in block.modules()}
        modules = (self.module.get_submodule(name) for name in self.plan.experts)
        return [module for module in modules if id(module) in inside]

    def gradient_scope(self, source: Mapping[int, Tensor]) -> GradientScope:
        """Return the ranks over which current gradients are spread.

        Args:
            source: id of the tensor that an optimizer holds in place of a parameter -> the parameter.
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
        """Return the number of ranks that hold parts of a parameter along the tensor, expert and pipeline axes.

        0 for a copy on a stage. Every stage counts its own parameters as one of ``pipeline`` parts.
        """
        if self._is_copy(name):
            return 0
        cut = self.cuts.get(name)
        return self._layout.pipeline * (1 if cut is None else cut.group.size())

    def _is_copy(self, name: str) -> bool:
        return self.owners.get(name, self._place["pipeline"]) != self._place["pipeline"]

    def shared_parameters(self) -> dict[dist.ProcessGroup, list[nn.Parameter]]:
        """Return parameters whose gradients must be summed over ranks, by process group."""
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

    def bucket_tag(self, name: str) -> str:
        """Return the tag that separates parameters in averages over replicas.

        Ranks with copies of a parameter must average it together with the same others: tensor ranks hold copies of
        unsplit parameters beside different parts, pipeline stages copies of tied ones beside different blocks.
        """
        if name in self._tied_places():
            return name
        return "cut" if self._tensor is not None and name in self.cuts else ""

    def _tied_places(self) -> dict[str, tuple[int, ...]]:
        """Return the pipeline ranks of parameters that several of them hold, by name."""
        if self._pipeline_cut is None:
            return {}
        places = {n: tuple(sorted({self._stage_ranks[s] for s in h})) for n, h in self._pipeline_cut.holders.items()}
        return {name: at for name, at in places.items() if len(at) > 1}

    def shares(self, held: Mapping[str, Share], names: Iterable[str]) -> dict[str, Share]:
        """Return this rank's share of each parameter of the whole module.

        Args:
            held: locally registered parameters by name, as if not split.
            names: of all parameters, in order.
        """
        found = {}
        for name in names:
            cut, pipeline = self.cuts.get(name), self._pipeline_cut
            if name not in held:
                ghost = None if pipeline is None else pipeline.ghosts.get(name)
                if pipeline is None or ghost is None:
                    raise RuntimeError(
                        f"{name} is no longer in the module, which is split over ranks since setup. Remove or replace "
                        "layers before (in __init__, configure_model or setup), or use strategy=ddp."
                    )
                found[name] = Share(pipeline.slots(name), ghost.shape, ghost, is_held=False, cut=cut)
                continue
            share = held[name]
            shape = share.shape if cut is None else cut.whole_shape(share.shape)
            slots = share.slots if pipeline is None else pipeline.slots(name)
            found[name] = Share(slots, shape, share.part, cut=cut)
        return found

    def parts_watch(self) -> PartsWatch | None:
        """Return the watch of uses of parts outside of their modules; ``None``: nothing is split."""
        if not self.cuts:
            return None
        slots = find_slots(self.module)
        named = {name: p for name, p in self.module.named_parameters() if name in self.cuts}
        parts = {name: (slots[id(p)], self.cuts[name]) for name, p in named.items()}
        owners = {owner for places, _ in parts.values() for owner, _ in places}
        attentions = {m for m in self.module.modules() if isinstance(m, nn.MultiheadAttention) and m.out_proj in owners}
        axes = [axis for axis in ("tensor", "expert") if getattr(self._layout, axis) > 1]
        remedy = "use " + " and ".join(f"{axis}=1" for axis in axes)
        return PartsWatch(self.module, parts, [*owners, *attentions], remedy)

    # ---- execution --------------------------------------------------------------------------------------------------

    @property
    def has_pipeline(self) -> bool:
        """True if the module is split into pipeline stages."""
        return self._pipeline_cut is not None

    @property
    def pipeline_stages(self) -> list[UserStepStage]:
        """Stages of this rank; none without a pipeline."""
        return [] if self._pipeline is None else self._pipeline.stages

    def attach(self, steps: Steps) -> PipelineEngine:
        """Connect the pipeline, after all other hooks are on the module."""
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
            steps=steps,
            batch_dims=self._options.batch_dims,
            sent_as=named_dtype(self._options.stage_dtype),
        )
        self._pipeline.attach()
        return self._pipeline

    def refresh(self) -> None:
        """Renegotiate what stages send, as trainable parameters may have changed; on all ranks between two steps."""
        if self._pipeline is not None:
            self._pipeline.refresh()

    def registered_ghosts(self) -> AbstractContextManager[set[nn.Parameter]]:
        """Register all parameters of the module inside; yields those that this rank does not hold."""
        return nullcontext(set()) if self._pipeline_cut is None else self._pipeline_cut.registered_ghosts()

    def complete(self) -> None:
        """Complete the partitioning, after sharding."""
        if self._context is not None:
            self._context.slice_between()

    def share_buffers(self) -> None:
        """Share the buffers of all stages among the pipeline ranks. A collective."""
        if self._pipeline is not None:
            self._pipeline.share_buffers()

    def detach(self) -> None:
        """Disconnect the pipeline; the module stays partitioned."""
        if self._pipeline is not None:
            self._pipeline.detach()
        self._pipeline = None

    def guard(self, function: Callable[[], Any]) -> Any:
        """Call ``function``, which runs the user's step, up to the end of this stage."""
        return function() if self._pipeline is None else self._pipeline.call(function)

    def join_micro_batches(self) -> bool:
        """Run a pipeline's code after the blocks once per batch from now on; returns whether this is new."""
        return self._pipeline is not None and self._pipeline.join_micro_batches()


def stage_spans(module: nn.Module, plan: ModelPlan, stages: int, split: str | tuple[int, ...]) -> list[range]:
    """Return the blocks of each stage.

    Args:
        module: whole.
        plan: with its blocks.
        stages: number of stages.
        split: blocks per stage, or ``"balanced"``: by number of parameters.
    """
    if isinstance(split, str):
        return split_blocks([float(count_parameters(module.get_submodule(name))) for name in plan.blocks], stages)
    return [range(end - size, end) for end, size in zip(accumulate(split), split, strict=True)]
