"""`launch=slurm`: one SLURM job of this run, through submitit; its logs are shown here until it ends.

The configuration is composed and checked here, and the run directory is made; the tasks of the job read it there (see
`trainwright.trainer.launch.slurm_job`). Nothing else is left to a batch script.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trainwright.trainer.check_recovery import RESTART
from trainwright.trainer.launch.ending import notices
from trainwright.trainer.launch.ends import empty_ends, ends_folder
from trainwright.trainer.launch.failure import RankError
from trainwright.trainer.launch.follow import Follower
from trainwright.trainer.launch.interrupt import Interrupted
from trainwright.trainer.launch.job_end import metrics_of, read_node
from trainwright.trainer.machine import num_gpus

CLUSTERS = ("slurm", "local")
# States that a job does not leave by itself.
_ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
)
_GONE = "gone"
# Seconds between two looks at the logs.
_LOOK_SECONDS = 0.5
# Seconds that a job has to end after it was cancelled, besides what SLURM gives its processes.
_CANCEL_SECONDS = 60.0
# Seconds that the tasks of the other machines have to end when one has, besides those that they have to save.
_WAIT_SECONDS = 60
# Seconds before the end of the time at which SLURM tells the ranks, besides those that they have to save.
_BEFORE_DEADLINE = 10
# Nobody gives a local job so long: submitit has no other word for "no limit".
_MINUTES = 60 * 24 * 365
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


# ---- what is refused -------------------------------------------------------------------------------------------------


def problems(cfg: DictConfig, verb: str) -> list[str]:
    """What is impossible about `launch`, with what to type instead.

    Args:
        cfg: resolved, with `run_dir` decided.
        verb: fit, validate, test or predict.
    """
    return [*_of_cluster(cfg), *_of_numbers(cfg), *_of_options(cfg), *_of_several_machines(cfg)]


def _of_cluster(cfg: DictConfig) -> Iterator[str]:
    cluster = cfg.launch.cluster
    if cluster not in CLUSTERS:
        yield f"launch.cluster={cluster}: unknown; clusters: {', '.join(CLUSTERS)}"
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


# ---- what is asked of sbatch -----------------------------------------------------------------------------------------


def sbatch_options(cfg: DictConfig, verb: str) -> dict[str, Any]:
    """What submitit is told for the job of a run: a task on each machine, and what `launch` says.

    Args:
        cfg: the resolved configuration.
        verb: fit, validate, test or predict.
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


# ---- one run ---------------------------------------------------------------------------------------------------------


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
        _say(f"submitted {job.name}, which goes on by itself; {job.how_to_follow}")
        return None
    _say(f"submitted {job.name}; Ctrl-C cancels it")
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
    for group in alike(cfgs, verb):
        found = submit([cfgs[number] for number in group], verb, folder, [titles[number] for number in group])
        _say(f"submitted {', '.join(job.name for job in found)}")
        if not found[0].on_slurm:
            follow(found, found[0].cfg.launch.poll_seconds)  # one after the other: nobody else queues them
        jobs += found
    if not cfgs[0].launch.wait:
        return [None] * len(cfgs)
    follow([job for job in jobs if job.on_slurm], cfgs[0].launch.poll_seconds)
    by_run_dir = {job.cfg.run_dir: job for job in jobs}
    return [_end_of(by_run_dir[cfg.run_dir]) for cfg in cfgs]


def alike(cfgs: Sequence[DictConfig], verb: str) -> list[list[int]]:
    """Numbers of the runs, those together that can be one array; without SLURM each alone."""
    groups: dict[str, list[int]] = {}
    for number, cfg in enumerate(cfgs):
        key = str(number) if cfg.launch.cluster == "local" else json.dumps(sbatch_options(cfg, verb), sort_keys=True)
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _end_of(job: SubmittedJob) -> dict[str, float] | Exception:
    try:
        return job.metrics()
    except RankError as error:
        return error
    except Interrupted as interrupted:
        return RankError(f"the run was ended by {interrupted.number.name}", 0, interrupted.exit_code)


def _say(text: str) -> None:
    print(f"trainwright: {text}", file=sys.stderr, flush=True)


@dataclass
class SubmittedJob:
    """The job of one run.

    Attributes:
        cfg: the resolved configuration of the run.
        job: submitit's.
        title: stands before the ranks in what is shown; empty = the run is the only one.
        state: as SLURM calls it, when it was last asked.
    """

    cfg: DictConfig
    job: Any
    title: str = ""
    state: str = ""

    @property
    def on_slurm(self) -> bool:
        """Whether SLURM has it; else it is a process of this machine."""
        return bool(self.cfg.launch.cluster == "slurm")

    @property
    def name(self) -> str:
        """For a person."""
        return f"{'SLURM job' if self.on_slurm else 'local job'} {self.job.job_id}"

    def output(self, node: int = 0) -> Path:
        """What its task on a machine prints: who starts the ranks, and where there is but one machine, rank 0."""
        return Path(self.job.task(node).paths.stdout)

    @property
    def how_to_end(self) -> str:
        """What to type to end it."""
        return f"scancel {self.job.job_id}" if self.on_slurm else f"kill -INT {self.job.job_id}"

    @property
    def how_to_follow(self) -> str:
        """What to type to see how it goes, and to end it."""
        return f"trainwright watch {self.cfg.run_dir}, or tail -F {self.output()}; {self.how_to_end} ends it"

    def metrics(self) -> dict[str, float]:
        """What rank 0 ended with.

        Raises:
            RankError: if a rank failed, or the job did.
            Interrupted: if the ranks were told to end.
        """
        run_dir = Path(self.cfg.run_dir)
        folder = ends_folder(run_dir)
        ends = [read_node(folder, node) for node in range(self.cfg.nodes)]
        silence = f"{self.name} ended ({self.state}) before it could say why; the last it said is in {self.output()}"
        return metrics_of(folder, self.cfg, ends, silence)


def submit(cfgs: Sequence[DictConfig], verb: str, folder: Path, titles: Sequence[str] = ("",)) -> list[SubmittedJob]:
    """Submit the jobs of several runs that ask for the same, as one array.

    Args:
        cfgs: the resolved configurations, each already written to its run directory.
        verb: fit, validate, test or predict.
        folder: for what submitit writes, scripts and outputs; all machines see it.
        titles: of the runs.
    """
    from submitit.helpers import clean_env

    from trainwright.trainer.launch.slurm_job import run_node

    for cfg in cfgs:
        empty_ends(Path(cfg.run_dir))
    executor = _executor(cfgs[0], verb, folder)
    with clean_env():
        if len(cfgs) == 1:
            jobs = [executor.submit(run_node, str(Path(cfgs[0].run_dir).absolute()), verb)]
        else:
            with executor.batch():
                jobs = [executor.submit(run_node, str(Path(cfg.run_dir).absolute()), verb) for cfg in cfgs]
    return [SubmittedJob(cfg, job, title) for cfg, job, title in zip(cfgs, jobs, titles, strict=True)]


def _executor(cfg: DictConfig, verb: str, folder: Path) -> Any:
    if cfg.launch.cluster == "local":
        from submitit import LocalExecutor

        executor = LocalExecutor(folder, python=cfg.launch.python)
        executor.update_parameters(
            timeout_min=_MINUTES,
            tasks_per_node=1,
            gpus_per_node=_gpus_here(cfg),
            stderr_to_stdout=True,
            setup=list(cfg.launch.setup),
        )
        return executor
    from submitit import SlurmExecutor

    executor = SlurmExecutor(folder, python=cfg.launch.python)
    executor.update_parameters(**sbatch_options(cfg, verb))
    return executor


def _gpus_here(cfg: DictConfig) -> int:
    """GPUs of this machine that a local job shall see; submitit hides all that nobody asks for."""
    if cfg.accelerator == "cpu":
        return 0
    asked = gpus_per_node(cfg)
    return min(int(cfg.devices), num_gpus()) if asked is None else asked


def follow(jobs: Sequence[SubmittedJob], poll_seconds: float) -> None:
    """Show what the ranks of jobs say, until all jobs have ended.

    Args:
        jobs: that were just submitted.
        poll_seconds: between two questions to SLURM.

    Raises:
        Interrupted: if this process was told to end; the jobs were cancelled.
    """
    logs = Follower()
    for job in jobs:
        ranks, several = range(job.cfg.devices * job.cfg.nodes), job.cfg.nodes > 1
        for node in range(job.cfg.nodes):
            # On one machine rank 0 prints where its task does.
            logs.add(job.output(node), f"[{job.title}node {node}]" if several else f"[{job.title}rank 0]")
        logs.add_ranks(Path(job.cfg.run_dir), ranks if several else ranks[1:], job.title)
    try:
        _wait(jobs, logs, poll_seconds)
    except (Interrupted, KeyboardInterrupt) as interrupted:
        number = interrupted.number if isinstance(interrupted, Interrupted) else signal.SIGINT
        cancel([job for job in jobs if job.state not in (*_ENDED, _GONE)])
        with contextlib.suppress(Interrupted, KeyboardInterrupt):  # who is impatient leaves the rest to SLURM
            _wait(jobs, logs, 1.0, _CANCEL_SECONDS)
        raise Interrupted(number) from None
    finally:
        logs.finish()


def _wait(jobs: Sequence[SubmittedJob], logs: Follower, poll_seconds: float, longest: float | None = None) -> None:
    """Until all jobs have ended, as two looks in a row say: between them, one may have been requeued."""
    on_slurm = any(job.on_slurm for job in jobs)
    begin, looked, seen_ended = time.monotonic(), -poll_seconds, 0
    poll_seconds = poll_seconds if on_slurm else _LOOK_SECONDS
    while longest is None or time.monotonic() - begin < longest:
        logs.poll()
        if time.monotonic() - looked >= poll_seconds:
            _ask(jobs)
            looked = time.monotonic()
            seen_ended = seen_ended + 1 if all(job.state in (*_ENDED, _GONE) for job in jobs) else 0
            if seen_ended == (2 if on_slurm else 1):
                return
        time.sleep(_LOOK_SECONDS)


def _ask(jobs: Sequence[SubmittedJob]) -> None:
    """Learn in which state the jobs are, and tell of what has changed."""
    local = [job for job in jobs if not job.on_slurm]
    states = _states([str(job.job.job_id) for job in jobs if job.on_slurm])
    states |= {str(job.job.job_id): "COMPLETED" if job.job.done() else "RUNNING" for job in local}
    for job in jobs:
        state = states.get(str(job.job.job_id), job.state)
        if state != job.state and state != _GONE and job.on_slurm:
            _say(f"{job.title}{job.name}: {state}")
        job.state = job.state if state == _GONE and job.state in _ENDED else state


def _states(ids: Sequence[str]) -> dict[str, str]:
    """States by number of the job; without those of which SLURM cannot be asked just now.

    `squeue` knows jobs for some minutes after their end, on clusters without accounting too.
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
    """End jobs: SLURM tells their ranks by SIGTERM, waits a while and kills them."""
    for job in jobs:
        _say(f"cancelling {job.name}")
        try:
            job.job.cancel(check=False)
        except Exception as error:  # of one job; the others are to end too
            _say(f"{job.name} could not be cancelled ({error}); type {job.how_to_end}")
