"""What to type to have a layout: overrides of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields

from trainwright.core.config.override_words import typed
from trainwright.core.layout import Layout
from trainwright.planning.search.plan import LayoutCandidate
from trainwright.planning.search.searched import Searched
from trainwright.strategies.contract.registry import strategy_options


def overrides_of(searched: Searched, candidate: LayoutCandidate) -> tuple[str, ...]:
    """What to type behind the recipe to have a candidate.

    Args:
        searched: the configuration that it was found for.
        candidate: a layout and how it is run.
    """
    return (
        *_machines(searched),
        *overrides_of_layout(candidate.strategy, candidate.layout, candidate.work.stage),
        *_overrides_of_step(candidate),
        *_overrides_of_module(searched, candidate),
        *_overrides_of_batch(searched, candidate),
    )


def overrides_of_axes(**sizes: int) -> tuple[str, ...]:
    """Those of a layout of the whole world with these axes, for what is refused whatever the others are."""
    return ("strategy=hybrid", *(f"strategy.{axis}={size}" for axis, size in sizes.items()))


def overrides_of_layout(strategy: str, layout: Layout, stage: int) -> tuple[str, ...]:
    """Those of a strategy and its axes.

    Args:
        strategy: name.
        layout: closed.
        stage: of ZeRO; 0: none.
    """
    options = strategy_options(strategy)
    takes = {item.name: item.default for item in fields(options)}
    sizes = {axis: size for axis, size in asdict(layout).items() if axis in takes and size != takes[axis]}
    if sizes.keys() == {"shard"} and not options.has_any_stage:
        sizes = {}  # it takes the rest, which are all
    of_any_stage = [f"strategy.stage={stage}"] if options.has_any_stage else []
    return (f"strategy={strategy}", *(f"strategy.{axis}={size}" for axis, size in sizes.items()), *of_any_stage)


def _machines(searched: Searched) -> Iterator[str]:
    """Devices of a machine and machines, where more were asked of one machine than it has."""
    node, devices, world_size = searched.profile.devices_per_node, searched.cfg.devices, searched.world_size
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


def _overrides_of_module(searched: Searched, candidate: LayoutCandidate) -> Iterator[str]:
    """What the configuration says about the model, as far as the strategy takes it."""
    for key, value in searched.said.items():
        if key in strategy_options(candidate.strategy).__dataclass_fields__:
            yield f"strategy.{key}={typed(value)}"


def _overrides_of_batch(searched: Searched, candidate: LayoutCandidate) -> Iterator[str]:
    yield f"micro_batch_size={candidate.micro_batch_size}"
    if searched.cfg.accumulation.steps is not None:
        yield f"accumulation.steps={candidate.accumulation}"
