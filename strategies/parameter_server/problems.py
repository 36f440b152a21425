"""Problems of servers that hold all parameters or tables only; loads no torch."""

from __future__ import annotations


def needs_interface(nodes: int) -> str:
    """Return the error of servers on several machines that others cannot reach."""
    return (
        f"nodes={nodes} with strategy.interface=null: servers listen at the loopback address only; type the name of a "
        "network interface, like strategy.interface=eth0 (messages are neither encrypted nor signed: choose one of a "
        "private network)"
    )


def needs_closure(optimizer: str) -> str:
    """Return the error of an optimizer whose step needs a closure."""
    return (
        f"optimizer {optimizer}: it computes the loss several times within a step (its step needs a closure), which "
        "servers do not support; type optimizer=adamw (or another one, such as AdamW or SGD), or strategy=ddp"
    )


def steps_are_served(asked: str) -> str:
    """Return the error of compression within optimizer steps."""
    return f"{asked} with strategy.placement: it compresses steps, and servers step tables; type compression=int8"


def tables_are_not_averaged(callback: str, key: str = "") -> str:
    """Return the error of a callback that averages a module with tables on servers."""
    instead = f"type {key}=null" if key else "leave out one of them"
    return f"{key or callback} with strategy.placement: the average would not include the servers' tables; {instead}"


def rank_problems(servers: int, world_size: int, option: str = "servers", own: bool = False) -> list[str]:
    """Return the problems of a number of servers, given the number of ranks.

    Args:
        servers: how many.
        world_size: number of all ranks.
        option: that sets ``servers``.
        own: whether servers have dedicated ranks.
    """
    if own and servers >= world_size:
        return [
            f"strategy.{option}={servers} with strategy.server_ranks=own on {world_size} rank(s): no rank is left to "
            f"train; type devices={servers + 1} or more, or strategy.server_ranks=beside"
        ]
    if own or servers <= world_size:
        return []
    return [
        f"strategy.{option}={servers} with {world_size} rank(s): a rank runs one server at most; type "
        f"strategy.{option}={world_size}"
    ]
