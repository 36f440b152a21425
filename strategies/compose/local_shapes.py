"""Parameter shapes of each pipeline rank, computed without process groups."""

from __future__ import annotations

from torch import nn

from trainwright.core.layout import Layout
from trainwright.strategies.compose.engine_options import EngineOptions
from trainwright.strategies.compose.engines import stage_spans
from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.schedules import stages_of_rank
from trainwright.strategies.plan.model_plan import ModelPlan
from trainwright.strategies.plan.tensor_rules import plan_splits

_Shape = tuple[int, ...]


def shapes_along_pipeline(
    module: nn.Module, plan: ModelPlan, layout: Layout, options: EngineOptions
) -> list[dict[str, _Shape]]:
    """Return the shapes of local parameters, before ZeRO, for each pipeline rank.

    Ranks along the tensor and expert axes hold parts of equal shapes.

    Args:
        module: whole; may be on the meta device.
        plan: of the module, with all parts that the layout needs.
        layout: closed.
        options: of the engines.

    Returns:
        Shapes by fully qualified name, one dict per pipeline rank.
    """
    shapes = _shapes(module, plan, layout)
    if layout.pipeline == 1:
        return [shapes]
    stages = options.stages(layout.pipeline)
    cut = PipelineCut(module, plan, stage_spans(module, plan, stages, options.split), [])
    found = []
    for rank in range(layout.pipeline):
        mine = set(stages_of_rank(rank, layout.pipeline, stages, options.schedule))
        found.append({name: shape for name, shape in shapes.items() if mine & set(cut.holders[name])})
    return found


def _shapes(module: nn.Module, plan: ModelPlan, layout: Layout) -> dict[str, _Shape]:
    """Return the shape of each parameter on the ranks that hold it."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    shapes = {name: list(parameter.shape) for name, parameter in module.named_parameters()}
    aliases = {alias: names[id(p)] for alias, p in module.named_parameters(remove_duplicate=False)}
    if layout.tensor > 1:
        dims = {aliases[alias]: split.dim for alias, split in plan_splits(module, plan).items()}
        for name, dim in dims.items():
            shapes[name][dim] //= layout.tensor
    if layout.expert > 1:
        for name in shapes:
            if any(name.startswith(f"{experts}.") for experts in plan.experts):
                shapes[name][0] //= layout.expert
    return {name: tuple(shapes[name]) for name in names.values()}
