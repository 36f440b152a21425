"""Which parameters are on parameter servers and which have the layout; loads no torch: the command line asks too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from trainwright.core.config.options import is_whole
from trainwright.core.layout import Layout

SERVER, SHARD, REPLICATE = "parameter_server", "shard", "replicate"
TARGETS = (SERVER, SHARD, REPLICATE)
_EXAMPLE = "{embedding.*:parameter_server,*:shard}"
_CUTTING_AXES = ("pipeline", "context", "tensor", "expert")


def placement_problems(layout: Layout, options: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What is wrong with a placement, each with what to type instead; empty when nothing is, or none is given.

    Args:
        layout: the axes, open or closed.
        options: ``placement`` (pattern of names of parameters -> target), ``table_servers``, ``interface``,
            ``offload``; missing ones are at their default.
        prefix: what stands before an option's name where it is typed.
    """
    placement = options.get("placement") or {}
    if not isinstance(placement, Mapping):
        return [
            f"{prefix}placement={placement}: must map patterns of names to targets; type {prefix}placement={_EXAMPLE}"
        ]
    if not placement:
        return list(_without_effect(options, prefix))
    unknown = {pattern: target for pattern, target in placement.items() if target not in TARGETS}
    if unknown:
        return [
            f"{prefix}placement: {pattern}: {target}: unknown; allowed are {', '.join(TARGETS)}; type for example "
            f"{prefix}placement={_EXAMPLE}"
            for pattern, target in unknown.items()
        ]
    return [*_target_problems(placement, layout, prefix), *_beside(layout, options, prefix)]


def _without_effect(options: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for option, default in (("table_servers", 1), ("interface", None)):
        if options.get(option, default) != default:
            yield (
                f"{prefix}{option}={options[option]} without {prefix}placement has no effect: no parameter is on a "
                f"server. Leave it out, or type {prefix}placement={_EXAMPLE}"
            )


def _target_problems(placement: Mapping[str, str], layout: Layout, prefix: str) -> Iterator[str]:
    if SERVER not in placement.values():
        yield (
            f"{prefix}placement names nothing for {SERVER}, so the layout alone decides; leave it out, or type "
            f"{prefix}placement={_EXAMPLE}"
        )
    if placement.get("*") == SERVER:
        yield (
            f"{prefix}placement puts everything on servers; type strategy=parameter_server, or name the tables: "
            f"{prefix}placement={_EXAMPLE}"
        )
    dense = {target for target in placement.values() if target != SERVER}
    if len(dense) > 1:
        yield (
            f"{prefix}placement gives parameters both {SHARD} and {REPLICATE}: all that is not on servers has one "
            f"layout; type one of them"
        )
    elif dense == {REPLICATE} and layout.shard != 1:
        yield (
            f"{prefix}placement says {REPLICATE} with {prefix}shard={layout.shard}, which splits the state; type "
            f"{prefix}shard=1 {prefix}replicate=-1, or say {SHARD}"
        )


def _beside(layout: Layout, options: Mapping[str, Any], prefix: str) -> Iterator[str]:
    servers = options.get("table_servers", 1)
    if not is_whole(servers, 1):
        yield f"{prefix}table_servers={servers}: must be a whole number of at least 1; type {prefix}table_servers=1"
    elif -1 not in (layout.replicate, layout.shard) and servers > layout.replicate * layout.shard:
        ranks = layout.replicate * layout.shard
        yield (
            f"{prefix}table_servers={servers} with {ranks} rank(s): a rank holds one server at most; type "
            f"{prefix}table_servers={ranks}"
        )
    given = [f"{prefix}{axis}={getattr(layout, axis)}" for axis in _CUTTING_AXES if getattr(layout, axis) != 1]
    if given:
        off = " ".join(f"{prefix}{axis}=1" for axis in _CUTTING_AXES if getattr(layout, axis) != 1)
        yield (
            f"{prefix}placement with {' '.join(given)}: every rank that has a table on servers reads samples of its "
            f"own, and ranks of these axes share theirs; type {off}"
        )


def served_names(placement: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Names of the parameters that go to servers: of the patterns that match one, the first counts.

    Args:
        placement: pattern (``*``, ``?``, ``[...]`` as in a shell; a star goes over dots) -> target.
        names: of all parameters.

    Raises:
        ValueError: if a pattern is the first that matches of no parameter.
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
