"""What is impossible about the options of parameter servers; loads no torch, since the command line asks too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainwright.core.config.options import is_number, is_whole
from trainwright.strategies.averaging.compression.options import (
    ONLY_OF_AVERAGES,
    choose_compression,
    compression_problems,
)

INCARNATION = "TRAINWRIGHT_INCARNATION"
"""Variable of a rank: how often it was started before, where lost ranks are started anew while the others go on."""

CONSISTENCIES = ("sync", "ssp", "async")
STALENESS = 3
"""Steps that a worker may be ahead of the slowest with ``"ssp"``, where nothing else is said."""
# Compressors that can write one message alone.
CODECS = ("fp16", "bf16", "int8", "topk", "onebit")
# What becomes of the samples that a dead worker had leased; none: samples are dealt in equal shares.
LEASES = ("none", "at_least_once", "at_most_once")
# Where servers are: beside workers, or on ranks that do nothing else.
BESIDE, OWN = "beside", "own"
DEFAULTS: Mapping[str, Any] = {
    "consistency": "sync",
    "staleness": None,
    "servers": 1,
    "server_ranks": BESIDE,
    "delay_compensation": 0.0,
    "scale_by_staleness": False,
    "compression": None,
    "interface": None,
    "leases": "none",
    "overlap": True,
}


def server_problems(options: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What is wrong with the options, each with what to type instead; empty when nothing is.

    Args:
        options: by name; those that are missing are at their default.
        prefix: what stands before an option's name where it is typed.
    """
    given = {**DEFAULTS, **{key: value for key, value in options.items() if key in DEFAULTS}}
    given["staleness"] = chosen_staleness(given["consistency"], given["staleness"])
    problems = [
        *_consistency_problems(given, prefix),
        *_server_count_problems(given, prefix),
        *_asynchronous_options(given, prefix),
        *_lease_problems(given, prefix),
        *_overlap_problems(given["overlap"], prefix),
    ]
    return problems + push_problems(given["compression"])


def learning_rate_warning(consistency: str, workers: int, groups: Sequence[Mapping[str, Any]]) -> str:
    """What to consider before workers step by themselves.

    Args:
        consistency: ``"ssp"`` or ``"async"``.
        workers: how many.
        groups: of all optimizers, with the learning rate and the momentum they begin with.
    """
    rate = max((float(group.get("initial_lr", group.get("lr", 0.0))) for group in groups), default=0.0)
    momentum = max((float(group.get("momentum", 0.0)) for group in groups), default=0.0)
    lower = f", and lower momentum={momentum:g}, which each of them feeds" if momentum else ""
    return (
        f"consistency={consistency}: {workers} workers make {workers} steps, each from a smaller batch, where workers "
        f"in step make one, so that a learning rate that suits these may diverge. Divide lr={rate:g} by about "
        f"{workers} (optimizer.lr={rate / workers:.2g}) if that was not done{lower}; or type strategy.consistency=sync."
    )


def chosen_staleness(consistency: Any, staleness: Any) -> Any:
    """The bound that is meant: :data:`STALENESS` with ``"ssp"`` where none is given."""
    return STALENESS if consistency == "ssp" and staleness is None else staleness


def push_problems(compression: Any) -> list[str]:
    """What is wrong with a choice of compression for what workers push.

    Args:
        compression: a name, a mapping of ``name`` and options, or ``None``.
    """
    found = compression_problems(compression)
    choice = None if found else choose_compression(compression)
    if choice is None:
        return found
    if choice.name in CODECS:
        return [_no_warm_up(key, choice.options[key]) for key in ONLY_OF_AVERAGES if key in choice.options]
    return [
        f"compression={choice.name} with parameter servers: it only averages over a group of ranks; what a worker "
        f"pushes to a server can be written as {', '.join(CODECS)}, or none; type compression=int8"
    ]


def _no_warm_up(key: str, value: Any) -> str:
    return (
        f"compression.{key}={value} with parameter servers: pushes are gradients, compressed from the first one on; "
        "leave it out"
    )


def _consistency_problems(given: Mapping[str, Any], prefix: str) -> list[str]:
    consistency, staleness = given["consistency"], given["staleness"]
    key = f"{prefix}consistency={consistency}"
    if consistency not in CONSISTENCIES:
        return [f"{key}: unknown; allowed are {', '.join(CONSISTENCIES)}"]
    if consistency == "ssp":
        if not is_whole(staleness, 1):
            hint = f"; {prefix}consistency=sync is a staleness of 0" if staleness == 0 else ""
            return [
                f"{prefix}staleness={staleness} with {key}: must be a whole number of steps from 1, by which a worker "
                f"may be ahead of the slowest; type {prefix}staleness={STALENESS}{hint}"
            ]
    elif staleness is not None:
        return [f"{prefix}staleness={staleness} with {key}: it is read with {prefix}consistency=ssp only; leave it out"]
    return []


def _server_count_problems(given: Mapping[str, Any], prefix: str) -> list[str]:
    servers, ranks = given["servers"], given["server_ranks"]
    problems = []
    if not is_whole(servers, 1):
        problems.append(f"{prefix}servers={servers}: must be a whole number of at least 1; type {prefix}servers=1")
    if ranks not in (BESIDE, OWN):
        problems.append(f"{prefix}server_ranks={ranks}: unknown; allowed are {BESIDE}, {OWN}")
    return problems


def _asynchronous_options(given: Mapping[str, Any], prefix: str) -> list[str]:
    problems = []
    strength = given["delay_compensation"]
    if not is_number(strength) or strength < 0:
        problems.append(f"{prefix}delay_compensation={strength}: must be a number from 0 (off)")
    elif strength and given["consistency"] == "sync":
        problems.append(
            f"{prefix}delay_compensation={strength} with {prefix}consistency=sync: gradients are never late there; "
            "leave it out"
        )
    if given["scale_by_staleness"] and given["consistency"] == "sync":
        problems.append(
            f"{prefix}scale_by_staleness=true with {prefix}consistency=sync: gradients are never late there; "
            "leave it out"
        )
    return problems


def _lease_problems(given: Mapping[str, Any], prefix: str) -> list[str]:
    leases, consistency = given["leases"], given["consistency"]
    if leases not in LEASES:
        return [f"{prefix}leases={leases}: unknown; allowed are {', '.join(LEASES)}"]
    if leases == "none" or consistency == "async" or consistency not in CONSISTENCIES:
        return []
    why = "all make each step together, so none can read more than another"
    if consistency == "ssp":
        why = (
            f"the bound is on steps, and each chunk is a step, so in an epoch none could read more than "
            f"{prefix}staleness={given['staleness']} chunks more than the slowest"
        )
    return [
        f"{prefix}leases={leases} with {prefix}consistency={consistency}: {why}; type {prefix}consistency=async, or "
        "leave it out"
    ]


def _overlap_problems(overlap: Any, prefix: str) -> list[str]:
    if isinstance(overlap, bool):
        return []
    return [f"{prefix}overlap={overlap}: must be true or false; leave it out for true"]


def rank_problems(servers: int, world_size: int, prefix: str = "", own: bool = False) -> list[str]:
    """What is wrong with a number of servers for so many ranks, each of which can hold one.

    Args:
        servers: how many.
        world_size: number of all ranks.
        prefix: what stands before an option's name where it is typed.
        own: whether servers have ranks of their own.
    """
    if own and servers >= world_size:
        return [
            f"{prefix}servers={servers} with {prefix}server_ranks={OWN} on {world_size} rank(s): no rank is left that "
            f"trains; type devices={servers + 1} or more, or {prefix}server_ranks={BESIDE}"
        ]
    if own or servers <= world_size:
        return []
    return [
        f"{prefix}servers={servers} with {world_size} rank(s): a rank holds one server at most; type "
        f"{prefix}servers={world_size}"
    ]
