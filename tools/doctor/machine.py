"""Cores, memory, how processes start, and how long importing takes."""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from trainwright.core.processes.machine import num_cores
from trainwright.core.text.sizes import size_text
from trainwright.tools.doctor.finding import Finding, error, ok, time_of, warning
from trainwright.tools.doctor.limits import Demand

AREA = "machine"
_ROOT = Path("/sys/fs/cgroup")
# What a rank holds once torch and Lightning are imported, and once it also trains something small.
_LEAST_MEMORY, _ENOUGH_MEMORY = 2**29, 2**30
_SLOW_IMPORT = 30.0
_NO_LIMIT = 2**60


@dataclass(frozen=True)
class MachineFacts:
    """A machine.

    Args:
        cores: that this process may use, by its affinity.
        quota: cores that the control group gives, as a time; ``None``: no limit.
        memory: bytes.
        available: bytes that could be used now, within the control group's limit.
        memory_limit: of the control group, bytes; ``None``: none.
        start_method: of multiprocessing, for data loaders' workers.
        platform: ``linux``, ``darwin``, ...
    """

    cores: int
    quota: float | None
    memory: int
    available: int
    memory_limit: int | None = None
    start_method: str = "fork"
    platform: str = "linux"


def machine_facts() -> MachineFacts:
    """Of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _memory_limit(_ROOT)
    available = _available(memory)
    if limit is not None:
        available = min(available, max(0, limit - used))
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return MachineFacts(num_cores(), cpu_quota(_ROOT), memory, available, limit, method, sys.platform)


def cpu_quota(root: Path) -> float | None:
    """Cores' worth of time that a control group gives; ``None``: no limit.

    Args:
        root: of the control groups, of version 2 or 1.
    """
    second = _words(root / "cpu.max")
    if len(second) == 2 and second[0].isdecimal():
        return int(second[0]) / int(second[1])
    quota, period = (_words(root / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if quota and period and quota[0].isdecimal():
        return int(quota[0]) / int(period[0])
    return None


def _memory_limit(root: Path) -> tuple[int | None, int]:
    """Bytes that a control group allows, and that it uses."""
    pairs = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
    for limit, used in pairs:
        allowed, taken = _words(root / limit), _words(root / used)
        if allowed and allowed[0].isdecimal() and int(allowed[0]) < _NO_LIMIT:
            return int(allowed[0]), int(taken[0]) if taken else 0
    return None, 0


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def _available(memory: int) -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return memory
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), memory)


def judge_machine(facts: MachineFacts, demand: Demand) -> list[Finding]:
    """Cores, memory and the start of processes, against the ranks of this machine."""
    return [_cores(facts, demand), _memory(facts, demand), _start_method(facts)]


def _cores(facts: MachineFacts, demand: Demand) -> Finding:
    usable = facts.cores if facts.quota is None else min(facts.cores, facts.quota)
    found = f"{facts.cores} cores"
    if facts.quota is not None:
        found += f", {facts.quota:g} of them by the control group's limit"
    busy = demand.ranks * demand.threads
    found += f" for {demand.ranks} ranks of {demand.threads} threads"
    if demand.ranks > usable and not demand.on_gpu:
        return warning(
            AREA,
            "cores",
            found,
            "a core for each rank; ranks that share one wait for each other in every collective",
            f"devices={max(1, int(usable))}, or more cores (docker run --cpus, srun --cpus-per-task)",
        )
    if busy > usable:
        return warning(
            AREA,
            "cores",
            found,
            f"at most {usable:g} threads together",
            f"launch.threads={max(1, int(usable // demand.ranks))}, or export OMP_NUM_THREADS",
        )
    if demand.ranks * demand.workers > 2 * usable:
        return warning(
            AREA,
            "cores",
            f"{found} with {demand.workers} workers of loaders each",
            f"at most about {int(2 * usable)} workers on this machine",
            f"num_workers={max(1, int(2 * usable // demand.ranks))} in the loaders",
        )
    return ok(AREA, "cores", found)


def _memory(facts: MachineFacts, demand: Demand) -> Finding:
    found = f"{size_text(facts.available)} available of {size_text(facts.memory)}"
    if facts.memory_limit is not None:
        found += f", {size_text(facts.memory_limit)} allowed by the control group"
    each = facts.available // demand.ranks
    if each >= _ENOUGH_MEMORY:
        return ok(AREA, "memory", found)
    judge = error if each < _LEAST_MEMORY else warning
    return judge(
        AREA,
        "memory",
        f"{found}: {size_text(each)} for each of {demand.ranks} ranks",
        f"{size_text(_ENOUGH_MEMORY)} for each rank before it holds a model; with less the kernel kills ranks",
        "fewer devices=, end what else runs, or raise the limit (docker run --memory, srun --mem)",
    )


def _start_method(facts: MachineFacts) -> Finding:
    found = f"processes of loaders start by {facts.start_method} on {facts.platform}"
    if facts.platform != "linux":
        return warning(
            AREA,
            "start of processes",
            found,
            "linux: elsewhere ranks are not ended with their launcher, and no limit is known",
            "use it to try things out; train on linux",
        )
    return ok(AREA, "start of processes", found)


def judge_import(seconds: float | None, limit: float, problem: str | None = None) -> list[Finding]:
    """How long a process takes until it can train.

    Args:
        seconds: that importing torch and Lightning took; ``None``: it was not done.
        limit: seconds that it had.
        problem: why it was not done; ``None``: unknown.
    """
    wanted = f"less than {_SLOW_IMPORT:.0f} s, on every start and restart of a rank"
    todo = "put the environment on a local disk (a network file system reads thousands of small files), or in an image"
    if seconds is None:
        what = f"torch and Lightning were not imported within {time_of(limit)}: {problem or 'it does not say why'}"
        return [error(AREA, "imports", what, wanted, f"python -c 'import torch, lightning' shows more; {todo}")]
    found = f"torch and Lightning are imported in {time_of(seconds)}"
    return [warning(AREA, "imports", found, wanted, todo) if seconds > _SLOW_IMPORT else ok(AREA, "imports", found)]
