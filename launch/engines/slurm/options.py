"""What `launch=slurm` asks of sbatch, as the configuration has it."""

from __future__ import annotations

import signal
from typing import Any

from omegaconf import DictConfig

from trainwright.launch.outcome.ending import notices

# Seconds that the tasks of the other machines have to end when one has, besides those that they have to save.
_WAIT_SECONDS = 60
# Seconds before the end of the time at which SLURM tells the ranks, besides those that they have to save.
_BEFORE_DEADLINE = 10


def sbatch_options(cfg: DictConfig) -> dict[str, Any]:
    """What submitit is told for the job of a run: a task on each machine, and what `launch` says.

    Args:
        cfg: the resolved configuration.
    """
    launch = cfg.launch
    options = {
        "job_name": str(cfg.name),
        "nodes": cfg.nodes,
        "ntasks_per_node": 1,
        "partition": launch.partition,
        "time": launch.time,  # None: the default of the partition, in the place of submitit's five minutes
        "account": launch.account,
        "qos": launch.qos,
        "constraint": launch.constraint,
        "exclusive": launch.exclusive or None,
        "gpus_per_node": gpus_per_node(cfg),
        "cpus_per_task": launch.cpus_per_task,
        "mem": None if launch.mem_gb is None else f"{int(launch.mem_gb * 1024)}M",
        "setup": list(launch.setup) or None,
        "srun_args": [*_waiting(cfg), *_container(cfg), *launch.srun] or None,
        "stderr_to_stdout": True,
        "additional_parameters": {
            **({"signal": _signal(cfg)} if _signal(cfg) else {}),
            **({"requeue": True} if cfg.preemption.requeue else {}),
            **{str(name): value for name, value in launch.sbatch.items()},
        },
    }
    if launch.array_parallelism is not None:
        options["array_parallelism"] = launch.array_parallelism
    return options


def gpus_per_node(cfg: DictConfig) -> int | None:
    """GPUs of a machine that the job asks for; None: it does not say."""
    if cfg.launch.gpus_per_node is not None:
        return int(cfg.launch.gpus_per_node) or None
    return int(cfg.devices) if cfg.accelerator == "gpu" else None


def _signal(cfg: DictConfig) -> str | None:
    """How SLURM tells all processes of the job that its time is nearly over; None: by the end alone."""
    heard = [number for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM) if number in notices(cfg)]
    if not heard:
        return None
    seconds = cfg.launch.signal_seconds
    if seconds is None:
        deadline = cfg.preemption.deadline_seconds
        seconds = _BEFORE_DEADLINE + (120 if deadline is None else int(deadline))
    return f"{heard[0].name.removeprefix('SIG')}@{seconds}"


def _waiting(cfg: DictConfig) -> list[str]:
    """How long srun waits for the other tasks when one has ended: torch's agents would wait for one that was killed."""
    if cfg.nodes == 1:
        return []
    deadline = cfg.preemption.deadline_seconds
    return [f"--wait={0 if deadline is None else _WAIT_SECONDS + int(deadline)}"]


def _container(cfg: DictConfig) -> list[str]:
    """Options of srun that Pyxis and others read."""
    launch = cfg.launch
    if launch.container_image is None:
        return []
    mounts = [f"--container-mounts={','.join(launch.container_mounts)}"] if launch.container_mounts else []
    return [f"--container-image={launch.container_image}", *mounts]
