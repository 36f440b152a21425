"""What is refused wherever servers hold parameters, all of them or tables alone; loads no torch."""

from __future__ import annotations


def needs_interface(nodes: int) -> str:
    """The problem of servers on several machines, of which no other one could reach them."""
    return (
        f"nodes={nodes} with strategy.interface=null: servers listen at the loopback address alone; type the name of a "
        "network interface, like strategy.interface=eth0 (messages are neither encrypted nor signed: choose one of a "
        "network that is yours)"
    )


def needs_closure(optimizer: str) -> str:
    """The problem of an optimizer that computes the loss within its step."""
    return (
        f"optimizer {optimizer}: it computes the loss several times within a step (its step needs a closure), which a "
        "server cannot; type optimizer=adamw (another one, such as AdamW or SGD), or strategy=ddp"
    )


def steps_are_served(asked: str) -> str:
    """The problem of a compression that takes part in the optimizer's step."""
    return (
        f"{asked} with strategy.placement: it takes part in the optimizer's step, which servers make for tables; type "
        "compression=int8"
    )


def tables_are_not_averaged(callback: str, key: str = "") -> str:
    """The problem of a callback that averages a module whose tables are on servers."""
    instead = f"type {key}=null" if key else "leave out one of them"
    return f"{key or callback} with strategy.placement: the average would have tables of its own; {instead}"


def rank_problems(servers: int, world_size: int, option: str = "servers", own: bool = False) -> list[str]:
    """What is wrong with a number of servers for so many ranks, each of which can hold one.

    Args:
        servers: how many.
        world_size: number of all ranks.
        option: that says how many.
        own: whether servers have ranks of their own.
    """
    if own and servers >= world_size:
        return [
            f"strategy.{option}={servers} with strategy.server_ranks=own on {world_size} rank(s): no rank is left that "
            f"trains; type devices={servers + 1} or more, or strategy.server_ranks=beside"
        ]
    if own or servers <= world_size:
        return []
    return [
        f"strategy.{option}={servers} with {world_size} rank(s): a rank holds one server at most; type "
        f"strategy.{option}={world_size}"
    ]
