"""Whether a launcher has started this process as one rank of many."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """What started this process as one rank of many.

    Attributes:
        name: torchrun or SLURM.
        rank: global rank of this process.
        world_size: number of ranks.
        local_world_size: number of ranks on this machine.
        agents: names of the processes of the launcher, one of each machine, where they start ranks again after
            failures; empty = they do not, or it is not known yet.
    """

    name: str
    rank: int
    world_size: int
    local_world_size: int
    agents: tuple[str, ...] = ()


def detect_launcher() -> Launcher | None:
    """The launcher that this process was started by; None when a person started it."""
    environment = os.environ
    if all(name in environment for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        world_size = int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_WORLD_SIZE", world_size))
        return Launcher("torchrun", int(environment["RANK"]), world_size, local)
    # In an interactive allocation (salloc, srun --pty) the variables are there, but nobody started ranks.
    interactive = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1 and not interactive:
        world_size = int(environment["SLURM_NTASKS"])
        nodes = int(environment.get("SLURM_NNODES", "1"))
        return Launcher("SLURM", int(environment["SLURM_PROCID"]), world_size, world_size // nodes)
    return None
