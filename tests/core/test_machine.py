"""CPU threads and memory of a rank."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

_SCRIPT = """
import sys
import torch
from trainwright.core.processes.machine import use_threads
if sys.argv[1] == "one":
    use_threads(1)
else:
    torch.set_num_threads = None
use_threads(2)
(torch.ones(300, 300) @ torch.ones(300, 300)).sum()
use_threads(2)
print(torch.get_num_threads(), torch.__config__.parallel_info())
"""


@pytest.mark.parametrize("before", ["one", "as torch chose"])
def test_threads_are_changed(before: str) -> None:
    # A process of its own: torch keeps a number of threads for good.
    command = [sys.executable, "-c", _SCRIPT, before]
    environment = {name: value for name, value in os.environ.items() if name != "MKL_NUM_THREADS"}
    environment["OMP_NUM_THREADS"] = "2" if before == "one" else "1"
    told = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    assert told.startswith("2 ")
    assert "mkl_get_max_threads() : 1\n" not in told


_FREES = """
from trainwright.core.processes.machine import keep_freed_memory
keep_freed_memory()
blocks = [bytearray(2**20) for _ in range(200)]
del blocks
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
@pytest.mark.parametrize(("setting", "is_kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_freed_memory_is_kept(setting: dict[str, str], is_kept: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", _FREES]
    told = subprocess.run(command, check=True, capture_output=True, text=True, env=environment | setting).stdout
    assert (int(told) > 150 * 2**10) is is_kept


_CALLS = """
import resource, sys
from trainwright.core.processes.machine import on_one_stack

def leaf():
    pass

def below(depth):
    for _ in range(1000):
        leaf()
    if depth:
        below(depth - 1)

def on_top():
    below(300)

before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
(on_one_stack(on_top) if sys.argv[1] == "one" else on_top)()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_calls_map_no_memory() -> None:
    # Somewhere among 300 frames a chunk of Python's stack ends, and each call of the leaf there needs another.
    of_one, of_chunks = (
        int(subprocess.run([sys.executable, "-c", _CALLS, how], check=True, capture_output=True, text=True).stdout)
        for how in ("one", "chunks")
    )
    assert of_chunks > of_one + 100
