"""Which ways to send cannot be had, as far as it can be told before a process starts."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from trainwright.core.layout import Layout
from trainwright.strategies.averaging.compression.options import compressor_names
from trainwright.strategies.contract.communication.options import (
    HIERARCHICAL,
    IN_PARTS,
    OFF,
    average_misfits,
    average_problems,
    prefetch_of_nothing,
    prefetch_problems,
)

_PREFIX = "strategy."


def communication_refusals(cfg: DictConfig, layout: Layout | None, devices: int | None) -> list[str]:
    """What speaks against the options of a strategy that say how it sends.

    Args:
        cfg: the resolved configuration.
        layout: closed; None = not known, or refused elsewhere.
        devices: ranks of a machine; None = refused elsewhere.
    """
    return [*_prefetch(cfg, layout), *_average(cfg, layout, devices)]


def _prefetch(cfg: DictConfig, layout: Layout | None) -> list[str]:
    prefetch, stage = cfg.strategy.get("prefetch"), cfg.strategy.get("stage", 3)
    problems = prefetch_problems(prefetch, stage, _PREFIX)
    if not problems and layout is not None and layout.world_size > 1 and "pipeline" not in cfg.strategy:
        problems += prefetch_of_nothing(prefetch, layout, _PREFIX)  # of a hybrid it is asked with its other options
    return problems


def _average(cfg: DictConfig, layout: Layout | None, devices: int | None) -> Iterator[str]:
    strategy = cfg.strategy
    if "sync_every" in strategy:
        return  # local updates have a word of their own for it
    average_by, per_node = strategy.get("average_by"), strategy.get("ranks_per_node")
    name = cfg.compression.name if cfg.compression.name in compressor_names() else None
    communication = strategy.get("communication", OFF)
    problems = average_problems(average_by, per_node, communication=communication, compression=name, prefix=_PREFIX)
    yield from problems
    if problems or average_by not in (IN_PARTS, HIERARCHICAL):
        return
    if layout is not None and devices is not None:
        yield from average_misfits(average_by, per_node or devices, layout, _PREFIX)
    if cfg.launch.recovery == "replicas":
        yield (
            f"strategy.average_by={average_by} with launch.recovery=replicas: the groups of ranks in which it averages "
            "would hold the lost one. Type launch.recovery=restart, or strategy.average_by=all_reduce"
        )
    if average_by == HIERARCHICAL and cfg.launch.min_devices is not None:
        yield (
            f"strategy.average_by=hierarchical with launch.min_devices={cfg.launch.min_devices}: with fewer devices "
            "nodes would hold unequally many replicas. Leave one of them out"
        )
