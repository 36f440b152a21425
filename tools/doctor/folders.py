"""Free disk, and memory that processes share."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from trainwright.core.text.sizes import size_text
from trainwright.tools.doctor.finding import Finding, error, ok, warning
from trainwright.tools.doctor.machine import Demand

AREA = "folders"
# Shared memory that NCCL takes for a rank, and a loader's worker for the batches that it holds ready.
_SHARED_OF_A_RANK = 64 * 2**20
_SHARED_OF_A_WORKER = 128 * 2**20
_LEAST_RUN_DISK, _ENOUGH_RUN_DISK = 2**30, 10 * 2**30
_LEAST_TMP, _ENOUGH_TMP = 2**28, 2**30
_FEW_INODES = 0.01
_REMOTE = ("nfs", "nfs4", "lustre", "cifs", "smb3", "beegfs", "gpfs", "ceph", "fuse.sshfs", "fuse.s3fs", "9p")


@dataclass(frozen=True)
class FolderFacts:
    """A folder that a run writes into.

    Args:
        path: as asked for.
        exists: the nearest of its parents that is there, or itself.
        free: bytes that this user may write.
        inodes: share of the file system's inodes that is free; ``None``: unknown.
        kind: of file system.
        problem: why nothing can be written; ``None``: it can.
    """

    path: str
    exists: str
    free: int
    inodes: float | None = None
    kind: str = ""
    problem: str | None = None


def folder_facts(path: str | Path) -> FolderFacts:
    """Describe a folder, which need not exist yet; a file is written into it, or the nearest parent, and removed."""
    existing = Path(path).absolute()
    while not existing.exists():
        existing = existing.parent
    about = os.statvfs(existing)
    problem = None
    try:
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as failure:
        problem = failure.strerror or str(failure)
    inodes = about.f_favail / about.f_files if about.f_files else None
    free = about.f_bavail * about.f_frsize
    return FolderFacts(str(path), str(existing), free, inodes, file_system(existing), problem)


def file_system(path: Path, mounts: str | None = None) -> str:
    """Return the kind of file system that a path is on; empty where the table of mounts cannot be read.

    Args:
        path: absolute.
        mounts: text of /proc/mounts; ``None``: that of this machine.
    """
    try:
        table = Path("/proc/mounts").read_text(encoding="utf-8") if mounts is None else mounts
    except OSError:
        return ""
    best, kind = "", ""
    for line in table.splitlines():
        _, mount, this, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        if path.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, this
    return kind


def judge_run_dir(facts: FolderFacts) -> Finding:
    """Judge the folder of logs and checkpoints."""
    todo = "free some, or type run_dir=<folder on a larger disk>"
    return _folder(facts, "run directory", _LEAST_RUN_DISK, _ENOUGH_RUN_DISK, "logs and checkpoints", todo)


def judge_tmp(facts: FolderFacts) -> list[Finding]:
    """Judge the folder of temporary files and sockets."""
    todo = "free some, or export TMPDIR=<folder on a larger local disk>"
    found = [_folder(facts, "temporary files", _LEAST_TMP, _ENOUGH_TMP, "sockets and compiled kernels", todo)]
    if facts.kind in _REMOTE:
        found.append(
            warning(
                AREA,
                "temporary files on a network",
                f"{facts.path} is on {facts.kind}",
                "a disk of the machine: locks and sockets of ranks lie there",
                "export TMPDIR=/tmp, or another local folder",
            )
        )
    return found


def _folder(facts: FolderFacts, check: str, least: int, enough: int, what: str, todo: str) -> Finding:
    if facts.problem is not None:
        words = f"nothing can be written: {facts.exists}: {facts.problem}"
        return error(AREA, check, words, f"a folder for {what}", todo)
    found = f"{size_text(facts.free)} free in {facts.exists}" + (f" ({facts.kind})" if facts.kind else "")
    if facts.free < enough:
        judge = error if facts.free < least else warning
        return judge(AREA, check, found, f"at least {size_text(enough)} for {what}", todo)
    if facts.inodes is not None and facts.inodes < _FEW_INODES:
        share = f"{facts.inodes:.1%} of the inodes of {facts.exists} are free"
        return warning(AREA, check, share, f"at least {_FEW_INODES:.0%}: each file takes one", todo)
    return ok(AREA, check, found)


def shared_memory(path: str = "/dev/shm") -> tuple[int, int]:  # noqa: S108 - it is asked how large it is
    """Return the total and free bytes of the memory that processes share; 0 where there is none."""
    try:
        about = os.statvfs(path)
    except OSError:
        return 0, 0
    return about.f_blocks * about.f_frsize, about.f_bavail * about.f_frsize


def judge_shared_memory(total: int, free: int, demand: Demand) -> Finding:
    """Judge whether batches of loaders' workers, and what ranks hand each other, fit.

    Args:
        total: bytes.
        free: bytes.
        demand: of the run.
    """
    needed = demand.ranks * (demand.workers * _SHARED_OF_A_WORKER + (_SHARED_OF_A_RANK if demand.on_gpu else 0))
    found = f"{size_text(free)} free of {size_text(total)} in /dev/shm"
    if free >= needed:
        return ok(AREA, "shared memory", found)
    who = f"{demand.ranks} ranks with {demand.workers} workers of loaders each"
    gib = max(1, -(-2 * needed // 2**30))
    todo = f"docker run --shm-size={gib}g (or --ipc=host); outside of a container: "
    todo += f"mount -o remount,size={gib}G /dev/shm; or fewer workers"
    # A worker that does not find room is killed by SIGBUS in the middle of an epoch.
    judge = error if free < needed // 4 else warning
    return judge(AREA, "shared memory", found, f"about {size_text(needed)} for {who}", todo)
