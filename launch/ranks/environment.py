"""The environment of a rank: what torch and Lightning read to know that it was started as one of many."""

import os

from omegaconf import DictConfig

from trainwright.core.processes.rendezvous import loopback_interfaces
from trainwright.core.text.messages import token_environment
from trainwright.launch.ranks.rendezvous import ADDRESS
from trainwright.launch.ranks.threads import threads_of_rank


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
        **of_rank(rank, cfg.devices, port, attempt),
        # Lightning takes a process with this one for a rank that was started outside.
        "TORCHELASTIC_RUN_ID": f"{cfg.name}-{os.getpid()}",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def of_rank(rank: int, world_size: int, port: int, attempt: int) -> dict[str, str]:
    """Variables in which the ranks of one machine differ, and in which a rank differs from attempt to attempt.

    Args:
        rank: global rank.
        world_size: number of ranks, all on this machine.
        port: where the store of this attempt listens, on the loopback interface.
        attempt: how often the ranks met before.
    """
    size = str(world_size)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "trainwright",
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
        # By this one torch knows that rank 0 need not open the store.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }


def _shared_machine(cfg: DictConfig) -> dict[str, str]:
    """What ranks need to share one machine well, unless the user has decided it."""
    errors = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    return {
        "OMP_NUM_THREADS": threads_of_rank(cfg, os.environ),
        errors: os.environ.get(errors, "1"),
        **loopback_interfaces(),
    }
