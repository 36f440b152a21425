"""No process outlives a command or an agent that was killed, stopped ones and those that hold the GIL included.

Attempts: 4, one each at a command, at torchrun's agent, at a script that starts processes in a thread, and at a rank
that has just begun to start a worker of its data loader. In the first three every process is stopped, or (rank 1) holds
the GIL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command.project import environment
from tests.faults.commands import Command, training, until
from tests.warm import WarmPopen
from trainwright.core.processes.process import PARENT, is_alive, stat_of

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems tell no process of the end of its parent"
)
# What is left after so many seconds is left for good; a tracker of resources removes files first.
_SECONDS = 10.0
FAULTY = ("data._target_=trouble.WorkerData", '+inject=[hang(rank=1, at_step=2, how="gil")]')


def descendants(process: int) -> dict[int, str]:
    """Living processes that a process, or one of these, has started: process id -> command line."""
    parents = dict(_parents())
    found = [process]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return {pid: _words(pid) for pid in found[1:]}


def _parents() -> Iterator[tuple[int, int]]:
    for process in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        fields = stat_of(process)  # none if it has just ended
        if fields:
            yield process, int(fields[PARENT])


def _words(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    except OSError:  # it has just ended
        return ""


def left(processes: dict[int, str]) -> dict[int, str]:
    """Those of these processes that do not end; they are killed."""
    end = time.monotonic() + _SECONDS
    while (living := {pid: words for pid, words in processes.items() if is_alive(pid)}) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    return living


def stop_all_but(run: Command, kept: set[int]) -> dict[int, str]:
    """Stop what a run has started, but for some processes and the tracker of resources; returns what that is.

    Rank 1 is not stopped, and holds the GIL by then.
    """
    log = Path("run/logs/rank_1.log")
    until(lambda: log.exists() and "hang" in log.read_text(), "the fault")
    time.sleep(0.2)  # the log precedes the fault
    started = descendants(run.process.pid)
    spared = {pid for pid, words in started.items() if "resource_tracker" in words or "guardian" in words}
    run.tell(signal.SIGSTOP, started.keys() - spared - kept)
    return started


def test_nothing_outlives_the_command(conf: Path) -> None:
    run = Command(training(conf, *FAULTY))
    started = stop_all_but(run, set(run.ranks()[1:]))
    assert len(started) == 6, started  # the fork server, the tracker of resources, two ranks, a worker of each
    run.tell(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    assert left(started) == {}


@pytest.mark.thorough
def test_nothing_outlives_the_agent_of_torchrun(conf: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    environment = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    run = Command([*torchrun, *training(conf, *FAULTY)[1:]], more=environment)
    ranks = sorted(pid for pid, parent in _parents() if parent == run.process.pid)
    started = stop_all_but(run, set(ranks[1:]))
    assert len(started) == 5, started  # two ranks, a worker of each, and the process that watches them
    run.tell(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    assert left(started) == {}


WORKER = """
import multiprocessing, os, time
from trainwright.trainer.data.data_connector import ShieldedWorker

def work(rank):
    print(os.getpid(), flush=True)
    while os.getppid() == rank:
        time.sleep(0.01)
    ShieldedWorker(None)(0)
    time.sleep(1000)

multiprocessing.get_context("fork").Process(target=work, args=(os.getpid(),)).start()
"""


def test_no_worker_of_a_loader_outlives_a_rank_that_was_killed_while_it_started_it() -> None:
    rank = WarmPopen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True, env=environment())
    assert rank.stdout is not None
    worker = int(rank.stdout.readline())
    assert is_alive(worker)
    rank.kill()
    rank.wait()
    assert left({worker: "the worker"}) == {}


THREADS = """
import os, sys, threading, time
from multiprocessing import forkserver
from trainwright.launch.ranks.forkserver import call_in_subprocess

parents = []
for _ in range(2):
    thread = threading.Thread(target=lambda: parents.append(call_in_subprocess(os.getppid)))
    thread.start()
    thread.join()
time.sleep(0.2)
parents.append(call_in_subprocess(os.getppid))
assert parents == [forkserver._forkserver._forkserver_pid] * 3, parents
threading.Thread(target=call_in_subprocess, args=(time.sleep, 1000.0), daemon=True).start()
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.thorough
def test_a_fork_server_outlives_the_thread_that_needed_it_first_and_no_more(tmp_path: Path) -> None:
    script = WarmPopen([sys.executable, "-c", THREADS], stdout=subprocess.PIPE, text=True, env=environment())
    assert script.stdout is not None
    try:
        assert script.stdout.readline() == "ready\n"
        started = descendants(script.pid)
        for pid, words in started.items():
            if "resource_tracker" not in words:
                os.kill(pid, signal.SIGSTOP)
    finally:
        script.kill()
        script.wait()
    assert left(started) == {}


BESIDE = """
import os, signal, time
from trainwright.core.run.interrupt import InsistentSignals, Interrupted
from trainwright.launch.ranks import forkserver

forkserver.num_cores = lambda: 2
assert forkserver.call_in_fork(os.getppid, meanwhile=lambda: None) == os.getpid()

def swallow():
    with InsistentSignals():
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException:
            pass

try:
    forkserver.call_in_fork(time.sleep, 1000.0, meanwhile=swallow)
except Interrupted as ended:
    print(ended.number.name)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("no process is left")
"""


def test_a_signal_during_imports_ends_what_runs_beside_them() -> None:
    # A plain process: torch is not imported, so composing takes one of its own.
    script = subprocess.run(
        [sys.executable, "-c", BESIDE], stdout=subprocess.PIPE, text=True, timeout=60, check=True, env=environment()
    )
    assert script.stdout == "SIGINT\nno process is left\n"
