"""World size and layout of a run, from its configuration. Light imports only."""

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.targets import lineage
from trainwright.core.layout import Layout
from trainwright.core.processes import machine
from trainwright.strategies.contract.options import PlannedRun, StrategyOptions
from trainwright.strategies.contract.registry import options_for_target

VERBS = ("fit", "validate", "test", "predict")
"""Kinds of runs."""


@dataclass(frozen=True)
class Surroundings:
    """Environment that a configuration is checked in.

    Attributes:
        verb: fit, validate, test or predict.
        world_size: ranks started by torchrun or SLURM; ``None`` if this command starts them.
        local_world_size: of these, ranks per machine; ``None`` as above, or irrelevant.
    """

    verb: str = "fit"
    world_size: int | None = None
    local_world_size: int | None = None


def resolve_devices(cfg: DictConfig) -> int:
    """Return the ranks on this machine: `devices`, where auto is all GPUs, or one rank on the CPU."""
    if cfg.devices == "auto":
        return max(1, machine.num_gpus()) if cfg.accelerator != "cpu" else 1
    return int(cfg.devices)


def has_world_size(cfg: DictConfig) -> bool:
    """Return whether devices and nodes are valid numbers, so that their product is a world size."""
    return cfg.nodes >= 1 and (cfg.devices == "auto" or (isinstance(cfg.devices, int) and cfg.devices >= 1))


def world_size_of(cfg: DictConfig, surroundings: Surroundings) -> int:
    """Return the number of ranks of the run."""
    return surroundings.world_size or resolve_devices(cfg) * cfg.nodes


def options_of(strategy: Any) -> StrategyOptions | None:
    """Return the options of a strategy's configuration, as the options class of its class or nearest known base.

    Args:
        strategy: mapping with ``_target_`` and options by name.

    Returns:
        The options; ``None``: the class is unknown.
    """
    paths = lineage(str(strategy.get("_target_", "")))
    known = next((found for found in map(options_for_target, paths) if found is not None), None)
    if known is None:
        return None
    plain: Any = OmegaConf.to_container(strategy, resolve=True) if isinstance(strategy, DictConfig) else dict(strategy)
    return known.take(plain)[0]


def planned_run(cfg: DictConfig, surroundings: Surroundings, options: StrategyOptions | None) -> PlannedRun:
    """Return the facts that a strategy's options are checked against."""
    has_launcher = surroundings.world_size is not None
    if not has_world_size(cfg):
        return PlannedRun(cfg, surroundings.verb, has_launcher=has_launcher)
    world_size = world_size_of(cfg, surroundings)
    layout = _closed(options, world_size)
    return PlannedRun(cfg, surroundings.verb, layout, world_size, resolve_devices(cfg), has_launcher)


def serving_ranks(cfg: DictConfig) -> int:
    """Return the number of ranks of a resolved configuration that only serve."""
    options = options_of(cfg.strategy)
    return 0 if options is None else options.serving_ranks


def num_data_ranks(cfg: DictConfig, world_size: int) -> int:
    """Return the number of data-parallel ranks of a validated configuration.

    Args:
        cfg: the configuration.
        world_size: of all ranks, including those that only serve.
    """
    options = options_of(cfg.strategy)
    return world_size if options is None else options.closed_layout(_training(options, world_size)).data_ranks


def closed_layout(cfg: DictConfig, surroundings: Surroundings) -> Layout | None:
    """Return the closed layout of a run; ``None`` if it is unknown or impossible."""
    if not has_world_size(cfg):
        return None
    return _closed(options_of(cfg.strategy), world_size_of(cfg, surroundings))


def layout_problem(options: StrategyOptions, world_size: int) -> list[str]:
    """Return why the layout is impossible on ``world_size`` ranks, including those that only serve."""
    try:
        options.closed_layout(_training(options, world_size))
    except ValueError as error:
        return [str(error)]
    return []


def _closed(options: StrategyOptions | None, world_size: int) -> Layout | None:
    if options is None or layout_problem(options, world_size):
        return None
    return options.closed_layout(_training(options, world_size))


def _training(options: StrategyOptions, world_size: int) -> int:
    return max(world_size - options.serving_ranks, 1)  # too many servers are refused elsewhere
