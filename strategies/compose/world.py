"""The ranks of a run and their layout, as its configuration asks for them. Imports nothing heavy."""

from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig

from trainwright.core.config.targets import lineage
from trainwright.core.layout import Layout
from trainwright.core.processes import machine
from trainwright.strategies.parameter_server.options import OWN

VERBS = ("fit", "validate", "test", "predict")
"""What a run may be."""
# Layouts of strategies that have no options for one, and of classes that build on them.
_LAYOUTS = {
    "SingleDeviceStrategy": Layout(),
    "DDPStrategy": Layout(replicate=-1),
    "ParameterServerStrategy": Layout(replicate=-1),
}


@dataclass(frozen=True)
class Surroundings:
    """What a configuration is held against.

    Attributes:
        verb: fit, validate, test or predict.
        world_size: number of ranks that torchrun or SLURM has started; None when this command starts them.
        local_world_size: number of these on a machine; None as above, or where it does not matter.
    """

    verb: str = "fit"
    world_size: int | None = None
    local_world_size: int | None = None


def resolve_devices(cfg: DictConfig) -> int:
    """Ranks on this machine: `devices`, where auto is all GPUs, or one rank on the CPU."""
    if cfg.devices == "auto":
        return max(1, machine.num_gpus()) if cfg.accelerator != "cpu" else 1
    return int(cfg.devices)


def has_world_size(cfg: DictConfig) -> bool:
    """Whether devices and nodes are possible numbers, so that a layout can be held against their product."""
    return cfg.nodes >= 1 and (cfg.devices == "auto" or (isinstance(cfg.devices, int) and cfg.devices >= 1))


def world_size_of(cfg: DictConfig, surroundings: Surroundings) -> int:
    """Number of ranks of the run."""
    return surroundings.world_size or resolve_devices(cfg) * cfg.nodes


def server_ranks(cfg: DictConfig) -> int:
    """Ranks of a resolved configuration that only serve; 0 where servers are beside workers, or there are none."""
    return int(cfg.strategy.servers) if cfg.strategy.get("server_ranks") == OWN else 0


def training_ranks(cfg: DictConfig, world_size: int) -> int:
    """How many of so many ranks make up the layout: all that do not only serve."""
    return max(world_size - server_ranks(cfg), 1)  # too many servers are refused elsewhere


def num_data_ranks(cfg: DictConfig, world_size: int) -> int:
    """Ranks that read different samples, for a configuration that `validate` found possible.

    Args:
        cfg: the configuration.
        world_size: of all ranks, those that only serve included.
    """
    layout, training = layout_of(cfg.strategy), training_ranks(cfg, world_size)
    return layout.resolve(training).data_ranks if layout is not None else training


def layout_of(strategy: Any) -> Layout | None:
    """The layout that a strategy's configuration asks for; None for a class whose layout only it knows."""
    sizes = {axis.name: strategy[axis.name] for axis in fields(Layout) if axis.name in strategy}
    if sizes:
        return Layout(**sizes)
    names = (path.rpartition(".")[2] for path in lineage(str(strategy.get("_target_", ""))))
    return next((_LAYOUTS[name] for name in names if name in _LAYOUTS), None)


def closed_layout(cfg: DictConfig, surroundings: Surroundings) -> Layout | None:
    """The layout of a run with all sizes known; None if the strategy's is not known or cannot be had."""
    if not has_world_size(cfg):
        return None
    try:
        layout = layout_of(cfg.strategy)
        return None if layout is None else layout.resolve(training_ranks(cfg, world_size_of(cfg, surroundings)))
    except ValueError:
        return None  # refused as a layout


def tells_layout(strategy: Any) -> bool:
    """Whether the layout, possible or not, is known before a process starts."""
    try:
        return layout_of(strategy) is not None
    except ValueError:
        return True


def is_hybrid(strategy: Any) -> bool:
    """Whether a strategy's configuration has all axes of a layout."""
    return all(axis.name in strategy for axis in fields(Layout))
