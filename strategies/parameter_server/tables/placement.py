"""Placement of parameters on servers; loads no torch, for the command line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from trainwright.core.config.options import class_of
from trainwright.core.layout import Layout
from trainwright.strategies.contract.options import AVERAGING_CALLBACKS, PlannedRun
from trainwright.strategies.parameter_server import problems

SERVER, SHARD, REPLICATE = "parameter_server", "shard", "replicate"
TARGETS = (SERVER, SHARD, REPLICATE)
_TYPED = "strategy.placement={embedding.*:parameter_server,*:shard}"
_ELSE = f"leave it out, or type {_TYPED}"
_CUTTING_AXES = ("pipeline", "context", "tensor", "expert")


def placement_problems(layout: Layout, placement: Any, servers: int, interface: str | None) -> Iterator[str]:
    """Yield the problems of a placement, with what to type instead.

    Args:
        layout: open or closed.
        placement: parameter name pattern -> target; ``None``: none.
        servers: number of table servers.
        interface: network interface of the servers.
    """
    if not placement:
        for option, given, default in (("table_servers", servers, 1), ("interface", interface, None)):
            if given != default:
                yield f"strategy.{option}={given} without strategy.placement has no effect; {_ELSE}"
    elif not isinstance(placement, Mapping):
        yield f"strategy.placement={placement}: must map patterns of names to targets; type {_TYPED}"
    elif set(placement.values()) <= set(TARGETS):
        yield from _target_problems(placement, layout)
        yield from _layout_problems(layout, servers)
    else:
        for pattern, target in placement.items():
            if target not in TARGETS:
                yield (
                    f"strategy.placement: {pattern}: {target}: unknown; allowed are {', '.join(TARGETS)}; type for "
                    f"example {_TYPED}"
                )


def placement_run_problems(run: PlannedRun, interface: str | None) -> Iterator[str]:
    """Yield what a configuration cannot combine with tables on servers.

    Args:
        run: to be trained.
        interface: network interface of the servers.
    """
    cfg = run.cfg
    if class_of(cfg.optimizer) == "LBFGS":
        yield problems.needs_closure("LBFGS")
    if cfg.nodes > 1 and interface is None:
        yield problems.needs_interface(cfg.nodes)
    if (recovery := cfg.launch.recovery) in ("replicas", "rejoin"):
        yield f"launch.recovery={recovery} with strategy.placement: tables have no copy; type launch.recovery=restart"
    name, sends = cfg.compression.get("name"), cfg.compression.get("sends")
    if name == "onebit" or sends == "steps":
        yield problems.steps_are_served(f"compression={name}" + (" compression.sends=steps" if sends else ""))
    for key, _, callback in run.parts("callbacks", "monitor"):
        if callback in AVERAGING_CALLBACKS:
            yield problems.tables_are_not_averaged(callback, key)


def _target_problems(placement: Mapping[str, str], layout: Layout) -> Iterator[str]:
    if SERVER not in placement.values():
        yield f"strategy.placement assigns nothing to {SERVER}, so it has no effect; {_ELSE}"
    if placement.get("*") == SERVER:
        yield f"strategy.placement puts all on servers; type strategy=parameter_server, or name the tables: {_TYPED}"
    dense = {target for target in placement.values() if target != SERVER}
    if len(dense) > 1:
        yield f"strategy.placement gives both {SHARD} and {REPLICATE}: the dense part has one layout; type one of them"
    elif dense == {REPLICATE} and layout.shard != 1:
        yield (
            f"strategy.placement gives {REPLICATE} with strategy.shard={layout.shard}, which shards the state; type "
            f"strategy.shard=1 strategy.replicate=-1, or give {SHARD}"
        )


def _layout_problems(layout: Layout, servers: int) -> Iterator[str]:
    if -1 not in (layout.replicate, layout.shard):
        yield from problems.rank_problems(servers, layout.replicate * layout.shard, "table_servers")
    given = [f"strategy.{axis}={getattr(layout, axis)}" for axis in _CUTTING_AXES if getattr(layout, axis) != 1]
    if given:
        off = " ".join(f"strategy.{axis}=1" for axis in _CUTTING_AXES if getattr(layout, axis) != 1)
        yield f"strategy.placement with {' '.join(given)}: ranks with tables must not share samples; type {off}"


def served_names(placement: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Return the names of parameters on servers; the first matching pattern counts.

    Args:
        placement: pattern (``*``, ``?``, ``[...]`` as in a shell; a star also matches dots) -> target.
        names: of all parameters.

    Raises:
        ValueError: if a pattern is the first match of no parameter.
    """
    first: dict[str, list[str]] = {pattern: [] for pattern in placement}
    every = list(names)
    for name in every:
        pattern = next((pattern for pattern in placement if fnmatchcase(name, pattern)), None)
        if pattern is not None:
            first[pattern].append(name)
    for pattern, found in first.items():
        if not found and placement[pattern] == SERVER:
            shown = ", ".join(every[:8]) + (", ..." if len(every) > 8 else "")
            raise ValueError(
                f"placement: {pattern} matches no parameter that an earlier pattern does not. Parameters are {shown}. "
                "Patterns match whole names, a star any part of them: embedding.* has all below the module embedding."
            )
    return [name for pattern, found in first.items() if placement[pattern] == SERVER for name in found]
