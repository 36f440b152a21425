"""The environment of a rank: what torch and Lightning read to know that it was started as one of many."""

import os

from omegaconf import DictConfig

from trainwright.core.processes.machine import threads_of_rank
from trainwright.core.processes.rendezvous import loopback_interfaces
from trainwright.core.text.messages import token_environment
from trainwright.launch.ranks.rendezvous import ADDRESS


def rank_environment(cfg: DictConfig, rank: int, port: int, attempt: int = 0) -> dict[str, str]:
    """Variables of this process, with those of one rank of this machine.

    Args:
        cfg: the resolved configuration; all its ranks are on this machine.
        rank: global rank.
        port: where the store of this attempt listens.
        attempt: how often the ranks were started before.
    """
    return {
        **os.environ,
        **_shared_machine(cfg),
        **token_environment(),
        **of_rank(rank, cfg.devices, (ADDRESS, port), attempt),
        # Lightning takes a process with this one for a rank that was started outside.
        "TORCHELASTIC_RUN_ID": f"{cfg.name}-{os.getpid()}",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def of_rank(
    rank: int, world_size: int, store: tuple[str, int], attempt: int, local_size: int | None = None
) -> dict[str, str]:
    """Variables in which ranks differ, and in which a rank differs from attempt to attempt.

    Args:
        rank: global rank.
        world_size: number of ranks.
        store: address and port of the store of this attempt.
        attempt: how often the ranks met before.
        local_size: ranks of a machine; None = all.
    """
    size = local_size or world_size
    found = {
        "RANK": rank,
        "LOCAL_RANK": rank % size,
        "ROLE_RANK": rank,
        "GROUP_RANK": rank // size,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": world_size // size,
        "ROLE_NAME": "trainwright",
        "MASTER_ADDR": store[0],
        "MASTER_PORT": store[1],
        # By this one torch knows that rank 0 need not open the store.
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": attempt,
    }
    return {name: str(value) for name, value in found.items()}


def _shared_machine(cfg: DictConfig) -> dict[str, str]:
    """What ranks need to share one machine well, unless the user has decided it."""
    errors = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    return {
        "OMP_NUM_THREADS": threads_of_rank(cfg.launch.threads, cfg.devices),
        errors: os.environ.get(errors, "1"),
        **loopback_interfaces(),
    }
