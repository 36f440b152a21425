"""What is impossible about `launch=slurm`, found before a job is submitted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from omegaconf import DictConfig

from trainwright.launch.recovery.check_recovery import RESTART

_CLUSTERS = ("slurm", "local")
# Options of sbatch that keys of `launch` stand for, and that say what the run says already.
_TYPED = {
    "account": "launch.account",
    "array": "trainwright fit -m",
    "constraint": "launch.constraint",
    "cpus-per-task": "launch.cpus_per_task",
    "exclusive": "launch.exclusive",
    "gpus-per-node": "launch.gpus_per_node",
    "job-name": "name",
    "mem": "launch.mem_gb",
    "nodes": "nodes",
    "ntasks": "devices",
    "ntasks-per-node": "devices",
    "partition": "launch.partition",
    "qos": "launch.qos",
    "signal": "launch.signal_seconds",
    "time": "launch.time",
}


def problems(cfg: DictConfig, verb: str) -> list[str]:
    """What is impossible about `launch`, with what to type instead.

    Args:
        cfg: resolved, with `run_dir` decided.
        verb: fit, validate, test or predict.
    """
    return [*_of_cluster(cfg), *_of_numbers(cfg), *_of_options(cfg), *_of_several_machines(cfg)]


def _of_cluster(cfg: DictConfig) -> Iterator[str]:
    cluster = cfg.launch.cluster
    if cluster not in _CLUSTERS:
        yield f"launch.cluster={cluster}: unknown; clusters: {', '.join(_CLUSTERS)}"
    elif cluster == "slurm" and shutil.which("sbatch") is None:
        yield (
            "launch=slurm: there is no sbatch on this machine; start the command where jobs are submitted, or type "
            "launch.cluster=local to try it without SLURM"
        )
    elif cluster == "local" and cfg.nodes > 1:
        yield f"launch.cluster=local with nodes={cfg.nodes}: it is this machine alone; type nodes=1"
    elif cluster == "local" and cfg.preemption.requeue:
        yield "preemption.requeue=true with launch.cluster=local: there is no queue; type preemption.requeue=false"


def _of_numbers(cfg: DictConfig) -> Iterator[str]:
    for key, least in (
        ("gpus_per_node", 0),
        ("cpus_per_task", 1),
        ("mem_gb", 0),
        ("signal_seconds", 1),
        ("array_parallelism", 1),
        ("poll_seconds", 0.1),
    ):
        given = cfg.launch[key]
        if given is not None and given < least:
            yield f"launch.{key}={given}: must be at least {least}" + (", or null" if key != "poll_seconds" else "")


def _of_options(cfg: DictConfig) -> Iterator[str]:
    for name in cfg.launch.sbatch:
        plain = str(name).replace("_", "-").lstrip("-")
        if plain in _TYPED:
            yield f"launch.sbatch.{name}: {_TYPED[plain]} says that; leave launch.sbatch.{name} out"
    if cfg.launch.container_mounts and cfg.launch.container_image is None:
        yield (
            "launch.container_mounts without launch.container_image: there is no container to mount them in; type "
            "launch.container_image=..., or leave launch.container_mounts out"
        )


def _of_several_machines(cfg: DictConfig) -> Iterator[str]:
    if cfg.nodes == 1:
        return
    if cfg.launch.recovery != RESTART:
        yield (
            f"launch.recovery={cfg.launch.recovery} with launch=slurm on nodes={cfg.nodes}: on several machines "
            "torchrun's agents start all ranks again; type launch.recovery=restart"
        )
    if cfg.launch.min_devices is not None:
        yield (
            f"launch.min_devices={cfg.launch.min_devices} with launch=slurm on nodes={cfg.nodes}: a job of several "
            "machines keeps them all; leave it out"
        )
