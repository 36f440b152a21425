"""Options of sbatch for `launch=slurm`."""

import signal
from typing import Any

from omegaconf import DictConfig

from trainwright.launch.outcome.interruption import handled_signals

# Seconds for the tasks of other machines to exit after one has, besides those for saving.
_WAIT_SECONDS = 60
# Seconds before the time limit at which SLURM signals the ranks, besides those for saving.
_BEFORE_DEADLINE = 10


def sbatch_options(cfg: DictConfig) -> dict[str, Any]:
    """Return submitit's parameters for the job of a run: one task per machine, and the options of `launch`.

    Args:
        cfg: the resolved configuration.
    """
    launch, own = cfg.launch, {"signal": _signal(cfg), "requeue": cfg.preemption.requeue}
    options = {
        "job_name": str(cfg.name),
        "nodes": cfg.nodes,
        "ntasks_per_node": 1,
        "partition": launch.partition,
        "time": launch.time,  # None = the partition's default instead of submitit's five minutes
        "account": launch.account,
        "qos": launch.qos,
        "constraint": launch.constraint,
        "exclusive": launch.exclusive or None,
        "gpus_per_node": gpus_per_node(cfg),
        "cpus_per_task": launch.cpus_per_task,
        "mem": None if launch.mem_gb is None else f"{int(launch.mem_gb * 1024)}M",
        "setup": list(launch.setup) or None,
        "srun_args": [*_srun_wait(cfg), *_container(cfg), *launch.srun] or None,
        "stderr_to_stdout": True,
        "additional_parameters": {
            **{name: value for name, value in own.items() if value},
            **{str(name): value for name, value in launch.sbatch.items()},
        },
    }
    if launch.array_parallelism is not None:
        options["array_parallelism"] = launch.array_parallelism
    return options


def gpus_per_node(cfg: DictConfig) -> int | None:
    """Return the GPUs per machine to request; None = unspecified."""
    if cfg.launch.gpus_per_node is not None:
        return int(cfg.launch.gpus_per_node) or None
    return int(cfg.devices) if cfg.accelerator == "gpu" else None


def _signal(cfg: DictConfig) -> str | None:
    """Return sbatch's option for the signal before the time limit; None = only the signal at the limit."""
    heard = [number for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM) if number in handled_signals(cfg)]
    if not heard:
        return None
    seconds = cfg.launch.signal_seconds
    if seconds is None:
        deadline = cfg.preemption.deadline_seconds
        seconds = _BEFORE_DEADLINE + (120 if deadline is None else int(deadline))
    return f"{heard[0].name.removeprefix('SIG')}@{seconds}"


def _srun_wait(cfg: DictConfig) -> list[str]:
    """Return srun's wait for other tasks after one has exited: torch's agents would wait for a killed one."""
    if cfg.nodes == 1:
        return []
    deadline = cfg.preemption.deadline_seconds
    return [f"--wait={0 if deadline is None else _WAIT_SECONDS + int(deadline)}"]


def _container(cfg: DictConfig) -> list[str]:
    """Return srun's container options of Pyxis and similar plugins."""
    launch = cfg.launch
    if launch.container_image is None:
        return []
    mounts = [f"--container-mounts={','.join(launch.container_mounts)}"] if launch.container_mounts else []
    return [f"--container-image={launch.container_image}", *mounts]
