"""Asking SLURM to put this job into its queue again."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

# scontrol answers at once, or its controller is down; then the process must still end in time.
_SECONDS = 10.0


def job_of(environment: Mapping[str, str]) -> str | None:
    """Id of the SLURM job that this process belongs to, of its own task in an array; ``None`` outside SLURM."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")
    return job if re.fullmatch(r"\d+(_\d+)?", job) else None


def requeue(environment: Mapping[str, str]) -> str | None:
    """Put the job into the queue again.

    Returns:
        Why that failed, with what to type instead; ``None`` if it did not.
    """
    job = job_of(environment)
    if job is None:
        return "this is no SLURM job (SLURM_JOB_ID is not set), so it cannot be requeued"
    if _is_ending(job, environment):
        return f"the job {job} is not requeued: SLURM is ending it already (cancelled, or to make room for another)"
    by_hand = f"type `scontrol requeue {job}` by hand"
    try:
        done = subprocess.run(  # noqa: S603 - a number and a name
            ["scontrol", "requeue", job],  # noqa: S607 - found by PATH, as every command of SLURM is
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            env=dict(environment),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the job {job} was not requeued ({error}); {by_hand}"
    if done.returncode != 0:
        said = done.stdout.decode(errors="replace").strip()
        return f"the job {job} was not requeued (scontrol: {said or done.returncode}); {by_hand}"
    return None


def _is_ending(job: str, environment: Mapping[str, str]) -> bool:
    """Whether the controller has ended the job, of which the processes have a while to live.

    A job that was cancelled would come back otherwise: it is told by SIGTERM, as one that is to make room is.
    """
    words = ["squeue", "--noheader", "--format=%T", f"--jobs={job}"]
    try:
        done = subprocess.run(  # noqa: S603 - a number and a name
            words, capture_output=True, timeout=_SECONDS, env=dict(environment), check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False  # nobody knows; scontrol says what it thinks of it
    return done.returncode == 0 and done.stdout.decode(errors="replace").strip() in ("COMPLETING", "CANCELLED")
