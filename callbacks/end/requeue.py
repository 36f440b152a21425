"""Requeueing of the current SLURM job."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

# scontrol answers at once, or its controller is down; the process must still end in time.
_SECONDS = 10.0


def job_of(environment: Mapping[str, str]) -> str | None:
    """Return the id of this process's SLURM job (of its own task in an array); ``None`` outside SLURM."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")
    return job if re.fullmatch(r"\d+(_\d+)?", job) else None


def requeue(environment: Mapping[str, str]) -> str | None:
    """Requeue the job and return ``None``, or the reason why that failed with what to type instead."""
    job = job_of(environment)
    if job is None:
        return "this is no SLURM job (SLURM_JOB_ID is not set), so it cannot be requeued"
    if _is_ending(job, environment):
        return f"the job {job} is not requeued: SLURM is already ending it (cancelled or preempted)"
    by_hand = f"type `scontrol requeue {job}`"
    try:
        done = _run(environment, "scontrol", "requeue", job)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the job {job} was not requeued ({error}); {by_hand}"
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()
        return f"the job {job} was not requeued (scontrol: {said or done.returncode}); {by_hand}"
    return None


def _is_ending(job: str, environment: Mapping[str, str]) -> bool:
    """Return whether the controller is ending the job. A cancelled job gets SIGTERM too, and must not come back."""
    try:
        done = _run(environment, "squeue", "--noheader", "--format=%T", f"--jobs={job}")
    except (OSError, subprocess.TimeoutExpired):
        return False  # unknown; scontrol decides
    return done.returncode == 0 and done.stdout.strip() in ("COMPLETING", "CANCELLED")


def _run(environment: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of SLURM, found by PATH."""
    return subprocess.run(  # noqa: S603 - a number and names
        words,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        errors="replace",
        timeout=_SECONDS,
        env=environment,
        check=False,
    )
