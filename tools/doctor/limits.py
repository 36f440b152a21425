"""Limits of processes, free disk, and memory that processes share."""

from __future__ import annotations

import os
import resource
import tempfile
from dataclasses import dataclass
from pathlib import Path

from trainwright.core.text.sizes import size_text
from trainwright.tools.doctor.finding import Finding, error, ok, warning

AREA = "limits"
_UNLIMITED = -1
# Files of a rank beside its connections: libraries, data, logs, pipes of data loaders' workers.
_FILES_OF_A_RANK = 256
_ENOUGH_FILES = 4096
# Threads of a rank beside those that compute: process groups, autograd, the watchdog, pin memory.
_THREADS_OF_A_RANK = 64
# Shared memory that NCCL takes for a rank, and a loader's worker for the batches that it holds ready.
_SHARED_OF_A_RANK = 64 * 2**20
_SHARED_OF_A_WORKER = 128 * 2**20
_LEAST_RUN_DISK, _ENOUGH_RUN_DISK = 2**30, 10 * 2**30
_LEAST_TMP, _ENOUGH_TMP = 2**28, 2**30
_FEW_INODES = 0.01
_REMOTE = ("nfs", "nfs4", "lustre", "cifs", "smb3", "beegfs", "gpfs", "ceph", "fuse.sshfs", "fuse.s3fs", "9p")


@dataclass(frozen=True)
class LimitFacts:
    """Soft and hard limits of this process; -1: unlimited.

    Args:
        files: open files.
        processes: of this user, threads included.
        locked: memory that may be locked, bytes.
        core: size of a core file, bytes.
        cgroup_processes: that the control group allows, -1: unlimited.
        core_pattern: where the kernel writes core files.
        infiniband: devices for RDMA.
    """

    files: tuple[int, int]
    processes: tuple[int, int]
    locked: tuple[int, int]
    core: tuple[int, int]
    cgroup_processes: int = _UNLIMITED
    core_pattern: str = "core"
    infiniband: tuple[str, ...] = ()


@dataclass(frozen=True)
class FolderFacts:
    """A folder that a run writes into.

    Args:
        path: as asked for.
        exists: the nearest of its parents that is there, or itself.
        free: bytes that this user may write.
        inodes: part of the file system's that is free; ``None``: it does not say.
        kind: of file system.
        problem: why nothing can be written; ``None``: it can.
    """

    path: str
    exists: str
    free: int
    inodes: float | None = None
    kind: str = ""
    problem: str | None = None


@dataclass(frozen=True)
class SharedMemoryFacts:
    """What processes of a machine share.

    Args:
        total: bytes of the folder for it; 0: it is not there.
        free: bytes.
    """

    total: int
    free: int


@dataclass(frozen=True)
class Demand:
    """What a run will ask for.

    Args:
        ranks: of this machine.
        world_size: all ranks.
        workers: of the data loaders of one rank.
        threads: that a rank computes with.
        on_gpu: whether ranks compute on GPUs.
        hosts: machines.
    """

    ranks: int
    world_size: int
    workers: int = 0
    threads: int = 1
    on_gpu: bool = False
    hosts: int = 1


# ---------------------------------------------------------------------------------------------------------------------
# Facts


def limit_facts() -> LimitFacts:
    """Of this process."""
    pattern = _text("/proc/sys/kernel/core_pattern") or "core"
    allowed = _text("/sys/fs/cgroup/pids.max") or _text("/sys/fs/cgroup/pids/pids.max")
    rdma = Path("/sys/class/infiniband")
    return LimitFacts(
        files=_limit(resource.RLIMIT_NOFILE),
        processes=_limit(resource.RLIMIT_NPROC),
        locked=_limit(resource.RLIMIT_MEMLOCK),
        core=_limit(resource.RLIMIT_CORE),
        cgroup_processes=int(allowed) if allowed.isdecimal() else _UNLIMITED,
        core_pattern=pattern,
        infiniband=tuple(sorted(each.name for each in rdma.iterdir())) if rdma.is_dir() else (),
    )


def _limit(which: int) -> tuple[int, int]:
    soft, hard = resource.getrlimit(which)
    return tuple(_UNLIMITED if each == resource.RLIM_INFINITY else each for each in (soft, hard))  # type: ignore[return-value]


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def folder_facts(path: str | Path) -> FolderFacts:
    """Of a folder, which need not exist yet; a file is written into it, or the nearest parent, and removed."""
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
    return FolderFacts(
        str(path), str(existing), about.f_bavail * about.f_frsize, inodes, file_system(existing), problem
    )


def file_system(path: Path, mounts: str | None = None) -> str:
    """Its kind, by the table of mounts; empty where that cannot be read.

    Args:
        path: absolute.
        mounts: text of /proc/mounts; ``None``: that of this machine.
    """
    table = _text("/proc/mounts") if mounts is None else mounts
    best, kind = "", ""
    for line in table.splitlines():
        _, mount, this, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        if path.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, this
    return kind


def shared_memory_facts(path: str = "/dev/shm") -> SharedMemoryFacts:  # noqa: S108 - it is asked how large it is
    """Of this machine."""
    try:
        about = os.statvfs(path)
    except OSError:
        return SharedMemoryFacts(0, 0)
    return SharedMemoryFacts(about.f_blocks * about.f_frsize, about.f_bavail * about.f_frsize)


# ---------------------------------------------------------------------------------------------------------------------
# Judgements


def judge_limits(facts: LimitFacts, demand: Demand, run_dir_free: int | None = None, memory: int = 0) -> list[Finding]:
    """Open files, processes, locked memory and core files.

    Args:
        facts: of a machine.
        demand: of the run.
        run_dir_free: bytes free where core files may be written; ``None``: unknown.
        memory: of the machine, bytes.
    """
    return [
        _files(facts, demand),
        _processes(facts, demand),
        _locked(facts, demand),
        _core(facts, run_dir_free, memory),
    ]


def _files(facts: LimitFacts, demand: Demand) -> Finding:
    soft, hard = facts.files
    # A process group connects every rank with every other one; several of them do.
    needed = _FILES_OF_A_RANK + 4 * demand.world_size + 16 * demand.workers
    found = f"{_count(soft)} open files allowed (hard limit {_count(hard)})"
    if soft == _UNLIMITED or soft >= max(needed, _ENOUGH_FILES):
        return ok(AREA, "open files", found)
    wanted = max(needed, _ENOUGH_FILES)
    if hard == _UNLIMITED or hard >= wanted:
        todo = f"ulimit -n {wanted if hard == _UNLIMITED else hard}"
    else:
        todo = f"have an administrator write '* - nofile {max(wanted, 65536)}' into /etc/security/limits.conf"
    judge = error if soft < needed else warning
    return judge(AREA, "open files", found, f"at least {wanted} (a rank here needs about {needed})", todo)


def _processes(facts: LimitFacts, demand: Demand) -> Finding:
    known = [each for each in (facts.processes[0], facts.cgroup_processes) if each != _UNLIMITED]
    allowed = min(known) if known else _UNLIMITED
    needed = demand.ranks * (1 + demand.workers) * (demand.threads + _THREADS_OF_A_RANK)
    found = f"{_count(allowed)} processes and threads allowed"
    if allowed == _UNLIMITED or allowed >= needed:
        return ok(AREA, "processes", found)
    if allowed == facts.cgroup_processes:
        todo = f"give the container more: docker run --pids-limit {2 * needed}"
    else:
        todo = f"ulimit -u {2 * needed}, or fewer ranks, threads (launch.threads=) or workers of loaders"
    judge = error if allowed < needed // 2 else warning
    return judge(AREA, "processes", found, f"about {needed} for {demand.ranks} ranks of this machine", todo)


def _locked(facts: LimitFacts, demand: Demand) -> Finding:
    soft = facts.locked[0]
    found = f"{'unlimited' if soft == _UNLIMITED else size_text(soft)} of memory may be locked"
    if soft == _UNLIMITED or not (facts.infiniband and demand.hosts > 1):
        return ok(AREA, "locked memory", found)
    devices = ", ".join(facts.infiniband)
    return error(
        AREA,
        "locked memory",
        f"{found}, and there are devices for RDMA ({devices})",
        "unlimited: NCCL registers its buffers with the network card, and fails with 'Cannot allocate memory'",
        "ulimit -l unlimited; in a container: docker run --ulimit memlock=-1; under SLURM: PropagateResourceLimits",
    )


def _core(facts: LimitFacts, free: int | None, memory: int) -> Finding:
    soft, pattern = facts.core[0], facts.core_pattern
    if soft == 0:
        return ok(AREA, "core files", "none are written (to look into a crash of native code: ulimit -c unlimited)")
    found = f"up to {'unlimited size' if soft == _UNLIMITED else size_text(soft)}, to {pattern}"
    here = not pattern.startswith(("/", "|"))
    if here and free is not None and memory and free < memory:
        return warning(
            AREA,
            "core files",
            f"{found}; {size_text(free)} are free here",
            f"room for what ranks hold in memory (up to {size_text(memory)}), since a crash of native code writes all "
            "of it",
            "ulimit -c 0",
        )
    return ok(AREA, "core files", found)


def judge_run_dir(facts: FolderFacts) -> list[Finding]:
    """Where logs and checkpoints are written."""
    todo = "free some, or type run_dir=<folder on a larger disk>"
    return [*_folder(facts, "run directory", _LEAST_RUN_DISK, _ENOUGH_RUN_DISK, "logs and checkpoints", todo)]


def judge_tmp(facts: FolderFacts) -> list[Finding]:
    """Where temporary files and sockets lie."""
    todo = "free some, or export TMPDIR=<folder on a larger local disk>"
    found = _folder(facts, "temporary files", _LEAST_TMP, _ENOUGH_TMP, "sockets and compiled kernels", todo)
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


def _folder(facts: FolderFacts, check: str, least: int, enough: int, what: str, todo: str) -> list[Finding]:
    found = f"{size_text(facts.free)} free in {facts.exists}" + (f" ({facts.kind})" if facts.kind else "")
    if facts.problem is not None:
        words = f"{facts.exists}: {facts.problem}"
        return [error(AREA, check, f"nothing can be written: {words}", f"a folder for {what}", todo)]
    if facts.free < enough:
        judge = error if facts.free < least else warning
        return [judge(AREA, check, found, f"at least {size_text(enough)} for {what}", todo)]
    if facts.inodes is not None and facts.inodes < _FEW_INODES:
        share = f"{facts.inodes:.1%} of the inodes of {facts.exists} are free"
        return [warning(AREA, check, share, f"at least {_FEW_INODES:.0%}: each file takes one", todo)]
    return [ok(AREA, check, found)]


def judge_shared_memory(facts: SharedMemoryFacts, demand: Demand) -> list[Finding]:
    """Whether batches of loaders' workers, and what ranks hand each other, fit."""
    needed = demand.ranks * (demand.workers * _SHARED_OF_A_WORKER + (_SHARED_OF_A_RANK if demand.on_gpu else 0))
    found = f"{size_text(facts.free)} free of {size_text(facts.total)} in /dev/shm"
    who = f"{demand.ranks} ranks with {demand.workers} workers of loaders each"
    todo = f"docker run --shm-size={max(1, -(-2 * needed // 2**30))}g (or --ipc=host); outside of a container: "
    todo += f"mount -o remount,size={max(1, -(-2 * needed // 2**30))}G /dev/shm; or fewer workers"
    if not needed or facts.free >= needed:
        return [ok(AREA, "shared memory", found)]
    # A worker that does not find room is killed by SIGBUS in the middle of an epoch.
    judge = error if facts.free < needed // 4 else warning
    return [judge(AREA, "shared memory", found, f"about {size_text(needed)} for {who}", todo)]


def _count(number: int) -> str:
    return "unlimited" if number == _UNLIMITED else f"{number:,}"
