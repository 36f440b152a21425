"""Command-line overrides that select a layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields

from trainwright.core.config.override_words import typed
from trainwright.core.layout import Layout
from trainwright.planning.search.plan import LayoutCandidate
from trainwright.planning.search.planned_config import PlannedConfig
from trainwright.strategies.contract.registry import strategy_options


def overrides_of(config: PlannedConfig, candidate: LayoutCandidate) -> tuple[str, ...]:
    """Return the overrides that select a candidate, after the recipe.

    Args:
        config: the configuration it was found for.
        candidate: a layout and its execution.
    """
    return (
        *_machines(config),
        *overrides_of_layout(candidate.strategy, candidate.layout, candidate.work.stage),
        *_overrides_of_step(candidate),
        *_overrides_of_module(config, candidate),
        *_overrides_of_batch(config, candidate),
    )


def overrides_of_axes(**sizes: int) -> tuple[str, ...]:
    """Return the overrides of some axes, for refusals that hold whatever the others are."""
    return ("strategy=hybrid", *(f"strategy.{axis}={size}" for axis, size in sizes.items()))


def overrides_of_layout(strategy: str, layout: Layout, stage: int) -> tuple[str, ...]:
    """Return the overrides of a strategy and its axes.

    Args:
        strategy: name.
        layout: closed.
        stage: of ZeRO; 0: none.
    """
    options = strategy_options(strategy)
    takes = {item.name: item.default for item in fields(options)}
    sizes = {axis: size for axis, size in asdict(layout).items() if axis in takes and size != takes[axis]}
    if sizes.keys() == {"shard"} and not options.has_any_stage:
        sizes = {}  # defaults to all ranks
    stage_option = [f"strategy.stage={stage}"] if options.has_any_stage else []
    return (f"strategy={strategy}", *(f"strategy.{axis}={size}" for axis, size in sizes.items()), *stage_option)


def _machines(config: PlannedConfig) -> Iterator[str]:
    """Yield devices and nodes, if more devices were requested than a node has."""
    node, devices, world_size = config.profile.devices_per_node, config.cfg.devices, config.world_size
    if isinstance(devices, int) and devices > node and world_size % node == 0:
        yield f"devices={node}"
        yield f"nodes={world_size // node}"


def _overrides_of_step(candidate: LayoutCandidate) -> Iterator[str]:
    work, cut = candidate.work, candidate.cut
    if work.has_pipeline:
        if work.schedule != "1f1b":
            yield f"strategy.schedule={work.schedule}"
        if work.stages_per_rank not in (1, 2):
            yield f"strategy.stages_per_rank={work.stages_per_rank}"
        yield f"strategy.micro_batches={work.parts}"
    if cut.sequence_parallel:
        yield "strategy.sequence_parallel=true"
    if cut.loss_parallel:
        yield "strategy.loss_parallel=true"
    if cut.context > 1 and cut.attention != "ring":
        yield f"strategy.attention={cut.attention}"
    if cut.checkpointing == "full":
        yield "strategy.activation_checkpointing=full"
    if work.offload != "none":
        yield f"strategy.offload={work.offload}"


def _overrides_of_module(config: PlannedConfig, candidate: LayoutCandidate) -> Iterator[str]:
    """Yield the model options that the strategy accepts."""
    for key, value in config.model_options.items():
        if key in strategy_options(candidate.strategy).__dataclass_fields__:
            yield f"strategy.{key}={typed(value)}"


def _overrides_of_batch(config: PlannedConfig, candidate: LayoutCandidate) -> Iterator[str]:
    yield f"micro_batch_size={candidate.micro_batch_size}"
    if config.cfg.accumulation.steps is not None:
        yield f"accumulation.steps={candidate.accumulation}"
