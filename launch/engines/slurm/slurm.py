"""`launch=slurm`: one SLURM job per run, through submitit; its logs are shown here until it ends.

The configuration is composed and checked, and the run directory created, here; the tasks of the job read it there (see
`trainwright.launch.engines.slurm.job`). The batch script does nothing else.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError
from trainwright.core.run.interrupt import Interrupted
from trainwright.launch.engines.slurm.options import sbatch_options
from trainwright.launch.engines.slurm.submit import SubmittedJob, follow, log_line, submit

# Options of sbatch that follow from keys of the configuration.
_SAME_NAME = ("account", "constraint", "cpus-per-task", "exclusive", "gpus-per-node", "partition", "qos", "time")
_TYPED = {name: f"launch.{name.replace('-', '_')}" for name in _SAME_NAME} | {
    "job-name": "name", "nodes": "nodes", "ntasks": "devices", "ntasks-per-node": "devices",
    "array": "trainwright fit -m", "mem": "launch.mem_gb", "signal": "launch.signal_seconds",
}  # fmt: skip


def problems(cfg: DictConfig) -> list[str]:
    """Return the problems of `launch`, with what to type instead.

    Args:
        cfg: resolved, with `run_dir` decided.
    """
    return [*_cluster_problems(cfg), *_option_problems(cfg)]


def _cluster_problems(cfg: DictConfig) -> Iterator[str]:
    cluster = cfg.launch.cluster
    if cluster == "slurm" and shutil.which("sbatch") is None:
        yield "launch=slurm: there is no sbatch on this machine; use one that has it, or type launch.cluster=local"
    elif cluster == "local" and cfg.nodes > 1:
        yield f"launch.cluster=local with nodes={cfg.nodes}: it uses only this machine; type nodes=1"
    elif cluster == "local" and cfg.preemption.requeue:
        yield "preemption.requeue=true with launch.cluster=local: there is no queue; type preemption.requeue=false"


def _option_problems(cfg: DictConfig) -> Iterator[str]:
    for name in cfg.launch.sbatch:
        plain = str(name).replace("_", "-").lstrip("-")
        if plain in _TYPED:
            yield f"launch.sbatch.{name}: {_TYPED[plain]} sets that; leave launch.sbatch.{name} out"
    if cfg.launch.container_mounts and cfg.launch.container_image is None:
        yield "launch.container_mounts without launch.container_image: type an image too, or leave them out"


# ---- the run ---------------------------------------------------------------------------------------------------------


def launch(cfg: DictConfig, verb: str) -> dict[str, float] | None:
    """Submit the job of a run, and show its logs until it ends.

    Args:
        cfg: the resolved configuration, already written to its run directory.
        verb: fit, validate, test or predict.

    Returns:
        The final metrics of rank 0 by name; None with `launch.wait=false`, when the job continues by itself.

    Raises:
        RankError: if a rank failed, or the job did.
        Interrupted: if this process was interrupted, and has cancelled the job; or if the ranks were.
    """
    [job] = submit([cfg], verb, Path(cfg.run_dir) / "logs" / "slurm")
    if not cfg.launch.wait:
        log_line(f"submitted {job.name}, which continues by itself; {job.follow_command}")
        return None
    log_line(f"submitted {job.name}; Ctrl-C cancels it")
    follow([job], cfg.launch.poll_seconds)
    return job.metrics()


def launch_all(
    cfgs: Sequence[DictConfig], verb: str, folder: Path, titles: Sequence[str]
) -> list[dict[str, float] | Exception | None]:
    """Submit the jobs of several runs, with identical options as one array, and show the logs of all.

    Args:
        cfgs: the resolved configurations, each already written to its run directory.
        verb: fit, validate, test or predict.
        folder: for submitit's files; visible to all machines.
        titles: of the runs, prefixes of their output.

    Returns:
        For each run its metrics, its error, or None with `launch.wait=false`.

    Raises:
        Interrupted: if this process was interrupted, and has cancelled the jobs.
    """
    jobs: list[SubmittedJob] = []
    for group in alike(cfgs):
        found = submit([cfgs[number] for number in group], verb, folder, [titles[number] for number in group])
        log_line(f"submitted {', '.join(job.name for job in found)}")
        if not found[0].on_slurm:
            follow(found, found[0].cfg.launch.poll_seconds)  # one after the other, because local jobs have no queue
        jobs += found
    if not cfgs[0].launch.wait:
        return [None] * len(cfgs)
    follow([job for job in jobs if job.on_slurm], cfgs[0].launch.poll_seconds)
    by_run_dir = {job.cfg.run_dir: job for job in jobs}
    return [_end_of(by_run_dir[cfg.run_dir]) for cfg in cfgs]


def alike(cfgs: Sequence[DictConfig]) -> list[list[int]]:
    """Return the indices of runs that can form one array, grouped; without SLURM each alone."""
    groups: dict[str, list[int]] = {}
    for number, cfg in enumerate(cfgs):
        key = str(number) if cfg.launch.cluster == "local" else json.dumps(sbatch_options(cfg), sort_keys=True)
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _end_of(job: SubmittedJob) -> dict[str, float] | Exception:
    try:
        return job.metrics()
    except RankError as error:
        return error
    except Interrupted as interrupted:
        return RankError(f"the run was ended by {interrupted.number.name}", 0, interrupted.exit_code)
