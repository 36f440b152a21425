"""`launch=slurm`: one SLURM job of this run, through submitit; its logs are shown here until it ends.

The configuration is composed and checked here, and the run directory is made; the tasks of the job read it there (see
`trainwright.launch.engines.slurm.job`). Nothing else is left to a batch script.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError
from trainwright.core.run.interrupt import Interrupted
from trainwright.launch.engines.slurm.options import sbatch_options
from trainwright.launch.engines.slurm.problems import problems
from trainwright.launch.engines.slurm.submit import SubmittedJob, follow, say, submit

__all__ = ["launch", "launch_all", "problems"]


def launch(cfg: DictConfig, verb: str) -> dict[str, float] | None:
    """Submit the job of a run, and show its logs until it ends.

    Args:
        cfg: the resolved configuration, already written to its run directory.
        verb: fit, validate, test or predict.

    Returns:
        The metrics that rank 0 ended with, by name; None with `launch.wait=false`: the job goes on by itself.

    Raises:
        RankError: if a rank failed, or the job did.
        Interrupted: if this process was told to end, and has cancelled the job; or if the ranks were.
    """
    [job] = submit([cfg], verb, Path(cfg.run_dir) / "logs" / "slurm")
    if not cfg.launch.wait:
        say(f"submitted {job.name}, which goes on by itself; {job.how_to_follow}")
        return None
    say(f"submitted {job.name}; Ctrl-C cancels it")
    follow([job], cfg.launch.poll_seconds)
    return job.metrics()


def launch_all(
    cfgs: Sequence[DictConfig], verb: str, folder: Path, titles: Sequence[str]
) -> list[dict[str, float] | Exception | None]:
    """Submit the jobs of several runs, those that ask for the same as one array, and show the logs of all.

    Args:
        cfgs: the resolved configurations, each already written to its run directory.
        verb: fit, validate, test or predict.
        folder: for what submitit writes; all machines see it.
        titles: of the runs, in front of what their ranks say.

    Returns:
        The end of each: its metrics, what went wrong, or None with `launch.wait=false`.

    Raises:
        Interrupted: if this process was told to end, and has cancelled the jobs.
    """
    jobs: list[SubmittedJob] = []
    for group in alike(cfgs):
        found = submit([cfgs[number] for number in group], verb, folder, [titles[number] for number in group])
        say(f"submitted {', '.join(job.name for job in found)}")
        if not found[0].on_slurm:
            follow(found, found[0].cfg.launch.poll_seconds)  # one after the other: nobody else queues them
        jobs += found
    if not cfgs[0].launch.wait:
        return [None] * len(cfgs)
    follow([job for job in jobs if job.on_slurm], cfgs[0].launch.poll_seconds)
    by_run_dir = {job.cfg.run_dir: job for job in jobs}
    return [_end_of(by_run_dir[cfg.run_dir]) for cfg in cfgs]


def alike(cfgs: Sequence[DictConfig]) -> list[list[int]]:
    """Numbers of the runs, those together that can be one array; without SLURM each alone."""
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
