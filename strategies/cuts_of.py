"""What a rank's parameters look like once a module is cut, without process groups and without cutting it."""

from __future__ import annotations

from torch import nn

from trainwright.strategies.engines import EngineOptions, stage_spans
from trainwright.strategies.layout import Layout
from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.schedules import stages_of_rank
from trainwright.strategies.plan import ModelPlan
from trainwright.strategies.tensor_rules import plan_splits


def local_shapes(
    module: nn.Module, plan: ModelPlan, layout: Layout, options: EngineOptions, pipeline_rank: int
) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter that a rank holds before ZeRO splits it, by fully qualified name.

    Ranks that differ along the tensor or expert axis hold parts of the same shape.

    Args:
        module: whole; its parameters may be on the meta device.
        plan: of the module, with all that the layout needs.
        layout: closed.
        options: how the module is cut.
        pipeline_rank: index along the pipeline axis.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    shapes = {name: list(parameter.shape) for name, parameter in module.named_parameters()}
    aliases = {alias: names[id(p)] for alias, p in module.named_parameters(remove_duplicate=False)}
    if layout.tensor > 1:
        # A tied parameter is split in each of its places, and once.
        dims = {aliases[alias]: split.dim for alias, split in plan_splits(module, plan).items()}
        for name, dim in dims.items():
            shapes[name][dim] //= layout.tensor
    if layout.expert > 1:
        for name in shapes:
            if any(name.startswith(f"{experts}.") for experts in plan.experts):
                shapes[name][0] //= layout.expert
    owned = names.values() if layout.pipeline == 1 else _owned(module, plan, layout, options, pipeline_rank)
    return {name: tuple(shapes[name]) for name in names.values() if name in set(owned)}


def _owned(
    module: nn.Module, plan: ModelPlan, layout: Layout, options: EngineOptions, pipeline_rank: int
) -> frozenset[str]:
    stages = options.stages(layout.pipeline)
    mine = stages_of_rank(pipeline_rank, layout.pipeline, stages, options.schedule)
    return PipelineCut(module, plan, stage_spans(module, plan, stages, options.split), mine).owned
