"""Submission of jobs of `launch=slurm` through submitit, their live output and cancellation."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trainwright.core.processes.machine import num_gpus
from trainwright.core.run.interrupt import Interrupted
from trainwright.core.text.messages import token_environment
from trainwright.launch.engines.slurm.options import gpus_per_node, sbatch_options
from trainwright.launch.outcome.rank_records import empty_ends, ends_folder, metrics_of, read_node
from trainwright.launch.ranks.follow import Follower

# Final states of a job.
_ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
)  # fmt: skip
_GONE = "gone"
# Seconds between two reads of the logs.
_POLL_SECONDS = 0.5
# Seconds that a cancelled job has to end, besides SLURM's grace period.
_CANCEL_SECONDS = 60.0
# A year, because submitit has no "no limit" for local jobs.
_MINUTES = 60 * 24 * 365


@dataclass
class SubmittedJob:
    """The job of one run.

    Attributes:
        cfg: the resolved configuration of the run.
        job: submitit's.
        title: prefix of its output; empty = the only run.
        state: SLURM's, at the last query.
    """

    cfg: DictConfig
    job: Any
    title: str = ""
    state: str = ""

    @property
    def on_slurm(self) -> bool:
        """Whether it is a job of SLURM; else a process of this machine."""
        return bool(self.cfg.launch.cluster == "slurm")

    @property
    def name(self) -> str:
        """Name of the job in messages."""
        return f"{'SLURM job' if self.on_slurm else 'local job'} {self.job.job_id}"

    def output(self, node: int = 0) -> Path:
        """Return the output file of its task on a machine: the launcher's, and on a single machine also rank 0's."""
        return Path(self.job.task(node).paths.stdout)

    @property
    def cancel_command(self) -> str:
        """Command that ends it."""
        return f"scancel {self.job.job_id}" if self.on_slurm else f"kill -INT {self.job.job_id}"

    @property
    def follow_command(self) -> str:
        """Commands that show its progress and end it."""
        return f"trainwright watch {self.cfg.run_dir}, or tail -F {self.output()}; {self.cancel_command} ends it"

    def metrics(self) -> dict[str, float]:
        """Return the final metrics of rank 0.

        Raises:
            RankError: if a rank failed, or the job did.
            Interrupted: if the ranks were interrupted.
        """
        folder = ends_folder(Path(self.cfg.run_dir))
        ends = [read_node(folder, node) for node in range(self.cfg.nodes)]
        silence = f"{self.name} ended ({self.state}) without a reason; its last output is in {self.output()}"
        return metrics_of(folder, self.cfg, ends, silence)


def submit(cfgs: Sequence[DictConfig], verb: str, folder: Path, titles: Sequence[str] = ("",)) -> list[SubmittedJob]:
    """Submit the jobs of several runs with identical options, as one array.

    Args:
        cfgs: the resolved configurations, each already written to its run directory.
        verb: fit, validate, test or predict.
        folder: for submitit's scripts and outputs; visible to all machines.
        titles: of the runs.
    """
    from submitit.helpers import clean_env

    from trainwright.launch.engines.slurm.job import run_node

    for cfg in cfgs:
        empty_ends(Path(cfg.run_dir))
    executor = _executor(cfgs[0], folder)
    os.environ.update(token_environment())  # jobs inherit the environment
    with clean_env():
        if len(cfgs) == 1:
            jobs = [executor.submit(run_node, str(Path(cfgs[0].run_dir).absolute()), verb)]
        else:
            with executor.batch():
                jobs = [executor.submit(run_node, str(Path(cfg.run_dir).absolute()), verb) for cfg in cfgs]
    return [SubmittedJob(cfg, job, title) for cfg, job, title in zip(cfgs, jobs, titles, strict=True)]


def _executor(cfg: DictConfig, folder: Path) -> Any:
    if cfg.launch.cluster == "local":
        from submitit import LocalExecutor

        executor = LocalExecutor(folder, python=cfg.launch.python)
        executor.update_parameters(
            timeout_min=_MINUTES,
            tasks_per_node=1,
            gpus_per_node=_local_gpus(cfg),
            stderr_to_stdout=True,
            setup=list(cfg.launch.setup),
        )
        return executor
    from submitit import SlurmExecutor

    executor = SlurmExecutor(folder, python=cfg.launch.python)
    executor.update_parameters(**sbatch_options(cfg))
    return executor


def _local_gpus(cfg: DictConfig) -> int:
    """Return the local GPUs that a local job may see; submitit hides those that are not requested."""
    if cfg.accelerator == "cpu":
        return 0
    asked = gpus_per_node(cfg)
    return min(int(cfg.devices), num_gpus()) if asked is None else asked


def follow(jobs: Sequence[SubmittedJob], poll_seconds: float) -> None:
    """Show the output of jobs until all have ended.

    Args:
        jobs: just submitted.
        poll_seconds: between two queries of SLURM.

    Raises:
        Interrupted: if this process was interrupted; the jobs were cancelled.
    """
    logs = Follower()
    for job in jobs:
        ranks, several = range(job.cfg.devices * job.cfg.nodes), job.cfg.nodes > 1
        for node in range(job.cfg.nodes):
            # On one machine rank 0 prints to the output of its task.
            logs.add(job.output(node), f"[{job.title}node {node}]" if several else f"[{job.title}rank 0]")
        logs.add_ranks(Path(job.cfg.run_dir), ranks if several else ranks[1:], job.title)
    try:
        _wait(jobs, logs, poll_seconds)
    except (Interrupted, KeyboardInterrupt) as interrupted:
        number = interrupted.number if isinstance(interrupted, Interrupted) else signal.SIGINT
        cancel([job for job in jobs if job.state not in (*_ENDED, _GONE)])
        with contextlib.suppress(Interrupted, KeyboardInterrupt):  # a second signal leaves the rest to SLURM
            _wait(jobs, logs, 1.0, _CANCEL_SECONDS)
        raise Interrupted(number) from None
    finally:
        logs.finish()


def _wait(jobs: Sequence[SubmittedJob], logs: Follower, poll_seconds: float, longest: float | None = None) -> None:
    """Wait until two queries in a row show all jobs ended: in between, one may have been requeued."""
    on_slurm = any(job.on_slurm for job in jobs)
    begin, looked, seen_ended = time.monotonic(), -poll_seconds, 0
    poll_seconds = poll_seconds if on_slurm else _POLL_SECONDS
    while longest is None or time.monotonic() - begin < longest:
        logs.poll()
        if time.monotonic() - looked >= poll_seconds:
            _ask(jobs)
            looked = time.monotonic()
            seen_ended = seen_ended + 1 if all(job.state in (*_ENDED, _GONE) for job in jobs) else 0
            if seen_ended == (2 if on_slurm else 1):
                return
        time.sleep(_POLL_SECONDS)


def _ask(jobs: Sequence[SubmittedJob]) -> None:
    """Query the states of the jobs, and print changes."""
    local = [job for job in jobs if not job.on_slurm]
    states = _states([str(job.job.job_id) for job in jobs if job.on_slurm])
    states |= {str(job.job.job_id): "COMPLETED" if job.job.done() else "RUNNING" for job in local}
    for job in jobs:
        state = states.get(str(job.job.job_id), job.state)
        if state != job.state and state != _GONE and job.on_slurm:
            log_line(f"{job.title}{job.name}: {state}")
        job.state = job.state if state == _GONE and job.state in _ENDED else state


def _states(ids: Sequence[str]) -> dict[str, str]:
    """Return states by job id, without jobs that cannot be queried at present.

    `squeue` knows jobs for some minutes after their end, even on clusters without accounting.
    """
    if not ids:
        return {}
    words = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %T", f"--jobs={','.join(ids)}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if done.returncode != 0:
        return dict.fromkeys(ids, _GONE) if "Invalid job id" in done.stderr else {}
    found = dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)
    return {each: found.get(each, _GONE) for each in ids}


def cancel(jobs: Sequence[SubmittedJob]) -> None:
    """Cancel jobs: SLURM sends SIGTERM to their ranks, waits and kills them."""
    for job in jobs:
        log_line(f"cancelling {job.name}")
        try:
            job.job.cancel(check=False)
        except Exception as error:  # of one job; the others must be cancelled too
            log_line(f"{job.name} could not be cancelled ({error}); type {job.cancel_command}")


def log_line(text: str) -> None:
    """Print a message beside the output of ranks."""
    print(f"trainwright: {text}", file=sys.stderr, flush=True)
