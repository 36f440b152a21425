"""Devices, cores and memory of this machine."""

import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

# SIOCGIFADDR in <linux/sockios.h>.
_GET_ADDRESS = 0x8915
# Numbers of glibc's <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Of a frame, 8 bytes each: the smallest chunk for them is 1 MiB.
_SLOTS = 70_000
_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60
_Called = TypeVar("_Called", bound=Callable[..., Any])


@dataclass(frozen=True)
class MachineFacts:
    """Resources of a machine.

    Args:
        cores: that this process may use, by its affinity.
        quota: CPU quota of the control group, in cores; ``None``: no limit.
        memory: bytes.
        available: bytes usable now, within the control group's limit.
        memory_limit: of the control group, bytes; ``None``: none.
    """

    cores: int
    quota: float | None
    memory: int
    available: int
    memory_limit: int | None = None


def num_gpus() -> int:
    """Return the number of GPUs that torch can use, without creating a CUDA context."""
    import torch

    return torch.cuda.device_count()


def has_mps() -> bool:
    """Return whether torch can use an Apple GPU."""
    import torch

    return torch.backends.mps.is_available()


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def threads_of_rank(asked: int | None, ranks: int) -> str:
    """Return OMP_NUM_THREADS for a rank: as configured, as in the environment, or its share of this machine's cores.

    Args:
        asked: `launch.threads`.
        ranks: on this machine.
    """
    return str(asked or os.environ.get("OMP_NUM_THREADS") or max(1, num_cores() // ranks))


def use_threads(count: int) -> None:
    """Compute with ``count`` CPU threads in the calling thread; with one, in every thread of the process.

    ``torch.set_num_threads`` sets the threads of MKL too, and from then on attention on the CPU takes as long as with
    one thread (torch 2.13, `python -m benchmarks.peers`). OpenMP alone is asked where MKL follows it.
    """
    import torch

    if torch.get_num_threads() == count:  # also makes torch ask MKL once, which would undo the next lines
        return
    openmp = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if count > 1 and openmp is not None:
        openmp(count)
    mkl_keeps_one = "mkl_get_max_threads() : 1\n" in torch.__config__.parallel_info()  # set by an earlier call
    if torch.get_num_threads() != count or (count > 1 and mkl_keeps_one):
        torch.set_num_threads(count)


def with_threads_of_caller(run: Callable[..., None]) -> Callable[..., None]:
    """Return ``run`` for a new thread, which computes with as many CPU threads as the thread that calls this."""
    import torch

    count = torch.get_num_threads()

    def started(*args: Any) -> None:
        use_threads(count)
        run(*args)

    return started


def keep_freed_memory() -> None:
    """Keep glibc from returning freed memory to the system after each step and asking for it again in the next.

    Both limits are those that it reaches by itself, see mallopt(3), but for memory at the end of the heap, which stays.
    Larger blocks are returned as before, and nothing changes where the environment sets a limit.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    mallopt(_MMAP_THRESHOLD, 32 * 2**20)
    mallopt(_TRIM_THRESHOLD, -1)


def on_one_stack(function: _Called) -> _Called:
    """Decorator: keep the frames of ``function`` and of all that it calls in one piece of memory.

    CPython keeps frames in chunks of 16 KiB and unmaps each with its last frame, so calls around the end of one map and
    unmap memory every time: 30,000 times in the imports of a start, 3 % of its time. A larger frame gets a chunk of
    its own, here 1 MiB, whose rest serves the calls; pages that no frame reaches take no memory.
    """
    assert isinstance(function, FunctionType)
    function.__code__ = function.__code__.replace(co_stacksize=_SLOTS)
    return function


def port_is_taken(port: int) -> bool:
    """Return whether another process listens on this TCP port of 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the rendezvous store does: a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno in (errno.EADDRINUSE, errno.EACCES)
    return False


def machine_facts() -> MachineFacts:
    """Return the resources of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _memory_limit(_ROOT)
    available = _available(memory)
    if limit is not None:
        available = min(available, max(0, limit - used))
    return MachineFacts(num_cores(), cpu_quota(_ROOT), memory, available, limit)


def cpu_quota(root: Path) -> float | None:
    """Return a control group's CPU quota in cores; ``None``: no limit.

    Args:
        root: of the cgroup hierarchy, version 2 or 1.
    """
    second = _words(root / "cpu.max")
    if len(second) == 2 and second[0].isdecimal():
        return int(second[0]) / int(second[1])
    quota, period = (_words(root / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if quota and period and quota[0].isdecimal():
        return int(quota[0]) / int(period[0])
    return None


def _memory_limit(root: Path) -> tuple[int | None, int]:
    """Return a control group's limit and usage of memory in bytes."""
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


def address_of(interface: str) -> str:
    """Return the first IPv4 address of a network interface; empty if it is down or has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""
