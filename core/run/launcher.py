"""Detection of the launcher that started this process as one of several ranks."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """Launcher that started this process as one of several ranks.

    Attributes:
        name: torchrun or SLURM.
        rank: global rank of this process.
        world_size: number of ranks.
        local_world_size: number of ranks on this machine.
        agents: process names of the launcher, one per machine, if it restarts failed ranks; empty if not, or unknown.
    """

    name: str
    rank: int
    world_size: int
    local_world_size: int
    agents: tuple[str, ...] = ()


def detect_launcher() -> Launcher | None:
    """Return the launcher that started this process; None if the user did."""
    environment = os.environ
    if all(name in environment for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        world_size = int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_WORLD_SIZE", world_size))
        return Launcher("torchrun", int(environment["RANK"]), world_size, local)
    # An interactive allocation (salloc, srun --pty) sets the variables without starting ranks.
    interactive = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1 and not interactive:
        world_size = int(environment["SLURM_NTASKS"])
        nodes = int(environment.get("SLURM_NNODES", "1"))
        return Launcher("SLURM", int(environment["SLURM_PROCID"]), world_size, world_size // nodes)
    return None
