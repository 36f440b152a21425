"""Checks of disk space and shared memory."""

from __future__ import annotations

import os

from trainwright.checkpoint.store.write_errors import free_bytes, refuse_unwritable
from trainwright.core.errors import CheckpointError
from trainwright.core.text.sizes import size_text
from trainwright.tools.doctor.finding import Finding, error, ok, warning
from trainwright.tools.doctor.machine import Demand

AREA = "folders"
# Shared memory per rank (NCCL) and per loader worker (prefetched batches).
_SHARED_PER_RANK = 64 * 2**20
_SHARED_PER_WORKER = 128 * 2**20
_LEAST_RUN_DISK, _ENOUGH_RUN_DISK = 2**30, 10 * 2**30


def judge_run_dir(path: str) -> Finding:
    """Check the folder of logs and checkpoints, which need not exist yet."""
    path = os.path.abspath(path)
    check, todo = "run directory", "free some, or type run_dir=<folder on a larger disk>"
    try:
        refuse_unwritable(path)
    except CheckpointError as problem:
        return error(AREA, check, str(problem), "a folder for logs and checkpoints", "type another run_dir=<folder>")
    free = free_bytes(path)
    if free is None:
        return ok(AREA, check, f"the free space of {path} is unknown")
    found = f"{size_text(free)} free in {path}"
    if free < _ENOUGH_RUN_DISK:
        judge = error if free < _LEAST_RUN_DISK else warning
        return judge(AREA, check, found, f"at least {size_text(_ENOUGH_RUN_DISK)} for logs and checkpoints", todo)
    return ok(AREA, check, found)


def shared_memory() -> tuple[int, int]:
    """Return total and free bytes of shared memory; 0 if there is none."""
    try:
        about = os.statvfs("/dev/shm")  # noqa: S108 - only its size is read
    except OSError:
        return 0, 0
    return about.f_blocks * about.f_frsize, about.f_bavail * about.f_frsize


def judge_shared_memory(total: int, free: int, demand: Demand) -> Finding:
    """Check that the batches of loader workers and NCCL's buffers fit into shared memory.

    Args:
        total: bytes.
        free: bytes.
        demand: what the run asks of this machine.
    """
    needed = demand.ranks * (demand.workers * _SHARED_PER_WORKER + (_SHARED_PER_RANK if demand.on_gpu else 0))
    found = f"{size_text(free)} free of {size_text(total)} in /dev/shm"
    if free >= needed:
        return ok(AREA, "shared memory", found)
    who = f"{demand.ranks} ranks with {demand.workers} loader workers each"
    gib = max(1, -(-2 * needed // 2**30))
    todo = f"docker run --shm-size={gib}g (or --ipc=host); outside a container: "
    todo += f"mount -o remount,size={gib}G /dev/shm; or fewer workers"
    # A worker that runs out of shared memory is killed by SIGBUS in mid-epoch.
    judge = error if free < needed // 4 else warning
    return judge(AREA, "shared memory", found, f"about {size_text(needed)} for {who}", todo)
