"""Detection of stopped processes by their state, but not of suspended jobs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults.commands import until
from trainwright.core.processes.process import STOPPED, TRACED, state_of, stop_id
from trainwright.launch.watchdog import monitor
from trainwright.launch.watchdog.boxes import HangLimits
from trainwright.launch.watchdog.inquiry import Inquiry
from trainwright.launch.watchdog.monitor import VARIABLE, DiagnosedHang, HangMonitor

LONG = HangLimits(floor_seconds=600.0, first_timeout=1800.0)
# Half a second, as those who watch ask.
LOOK = 0.5

RANK = """
import ctypes, os, signal, sys
from trainwright.launch.watchdog.boxes import ProgressBox

box = ProgressBox(sys.argv[1], int(sys.argv[2]), rank=int(sys.argv[2]))
box.begin("forward")
print("ready", flush=True)
for line in sys.stdin:
    # PTRACE_TRACEME: who has started this process is its debugger, which holds it at its next signal.
    ctypes.CDLL(None).ptrace(0, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


class Job:
    """Ranks within a phase, and their monitor, whose clock advances only when it checks."""

    def __init__(self, count: int, folder: Path, limits: HangLimits, clock: list[float]) -> None:
        self.clock = clock
        self.monitor = HangMonitor(count, folder, folder, limits)
        self.ranks = [self._start(rank) for rank in range(count)]
        for rank, process in enumerate(self.ranks):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            self.monitor.watch(rank, process.pid)
        self.look(2 * LOOK)

    def _start(self, rank: int) -> subprocess.Popen[str]:
        place = json.loads(self.monitor.environment(rank)[VARIABLE])
        command = [sys.executable, "-c", RANK, place["boxes"], str(place["box"])]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def look(self, seconds: float, step: float = LOOK) -> DiagnosedHang | None:
        """Check repeatedly for `seconds`; return what is found, if anything."""
        for _ in range(round(seconds / step)):
            self.clock[0] += step
            found = self.monitor.check()
            if found is not None:
                return found
        return None

    def find(self, seconds: float, step: float = LOOK) -> DiagnosedHang:
        """Check repeatedly for `seconds`; something must be found."""
        found = self.look(seconds, step)
        assert found is not None
        return found

    def stop(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].send_signal(signal.SIGSTOP)
            self._await(rank, lambda state: state == STOPPED)

    def go_on(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].send_signal(signal.SIGCONT)
            self._await(rank, lambda state: state != STOPPED)

    def hold(self, rank: int) -> None:
        """Stop a rank as a debugger does."""
        stdin = self.ranks[rank].stdin
        assert stdin is not None
        stdin.write("be held\n")
        stdin.flush()
        # Read here, or Popen would take this news of the process for its end, and never kill it.
        _, status = os.waitpid(self.ranks[rank].pid, 0)
        assert os.WIFSTOPPED(status)
        assert state_of(self.ranks[rank].pid) == TRACED

    def _await(self, rank: int, wanted: Callable[[str], bool]) -> None:
        until(lambda: wanted(state_of(self.ranks[rank].pid)), f"the change of rank {rank}")

    def end(self) -> None:
        for process in self.ranks:
            process.kill()
            process.communicate()
        self.monitor.close()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    """Return a factory of jobs, whose ranks end with the test."""
    clock, jobs = [100.0], []
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def start(count: int, limits: HangLimits = LONG) -> Job:
        jobs.append(Job(count, tmp_path, limits, clock))
        return jobs[-1]

    yield start
    for each in jobs:
        each.end()


@pytest.mark.parametrize("limits", [LONG, HangLimits(fixed=600.0)], ids=["learned", "fixed"])
def test_stopped_rank_is_detected_early(limits: HangLimits, job: Any) -> None:
    ranks = job(3, limits)
    ranks.stop(1)
    assert ranks.look(1.0) is None  # it may be the first of all
    found = ranks.find(1.0)
    assert found.rank == 1
    assert found.report.startswith("Hang: rank 1 is in phase forward, stopped by a signal (SIGSTOP)")
    assert "does not answer; state of its process: T" in Path(found.report.rpartition(": ")[2]).read_text()


def test_detection_is_independent_of_the_interval(job: Any) -> None:
    ranks = job(2)
    ranks.stop(0)
    assert ranks.look(1.0, step=0.1) is None
    assert ranks.find(1.0, step=0.1).rank == 0


def test_two_stopped_ranks(job: Any) -> None:
    ranks = job(3)
    ranks.stop(1, 2)
    found = []
    for _ in range(2):
        found.append(ranks.find(2.0).rank)
        ranks.ranks[found[-1]].kill()
        ranks.ranks[found[-1]].wait()
    assert set(found) == {1, 2}
    assert ranks.look(60.0) is None


def test_single_stopped_rank_has_its_limit(job: Any) -> None:
    ranks = job(1, HangLimits(fixed=20.0))
    ranks.stop(0)
    assert ranks.look(15.0) is None
    assert "stopped by a signal (SIGSTOP)" in ranks.find(10.0).report


def test_suspended_job(job: Any) -> None:
    """Neither while it is suspended, nor while its ranks are continued one by one, nor afterwards."""
    ranks = job(3, HangLimits(fixed=20.0))
    ranks.stop(0, 1, 2)
    assert ranks.look(600.0) is None
    ranks.go_on(1)
    assert ranks.look(1.0) is None
    ranks.go_on(0, 2)
    assert ranks.look(5.0) is None


def test_suspended_monitor(job: Any) -> None:
    ranks = job(2, HangLimits(fixed=20.0))
    ranks.stop(1)
    assert ranks.look(LOOK) is None  # seen on the way to the others
    assert ranks.look(3600.0, step=3600.0) is None  # and rank 0 is continued before rank 1
    assert ranks.look(1.0) is None
    ranks.go_on(1)
    assert ranks.look(5.0) is None


def test_infrequent_checks(job: Any) -> None:
    ranks = job(2)
    ranks.stop(1)
    assert ranks.look(300.0, step=3.0) is None
    assert ranks.look(3.0) is not None


def test_repeatedly_stopped_process(job: Any) -> None:
    """Like a process throttled by a CPU limiter."""
    ranks = job(2)
    for _ in range(20):
        ranks.stop(1)
        assert ranks.look(LOOK) is None
        ranks.go_on(1)


def test_debugged_rank(job: Any) -> None:
    ranks = job(2, HangLimits(fixed=20.0))
    ranks.hold(1)
    assert ranks.look(60.0) is None


def test_inquiries_about_a_stop(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = []

    class Counted(Inquiry):
        def __init__(self, *args: Any) -> None:
            questions.append(args)
            super().__init__(*args)

    monkeypatch.setattr(monitor, "Inquiry", Counted)
    ranks = job(3)
    ranks.hold(0)  # by a person, who is left alone
    for count in (1, 2):
        ranks.stop(1)
        assert ranks.look(10.0) is None
        assert len(questions) == count
        ranks.go_on(1)
    ranks.stop(1)
    assert ranks.look(2 * LONG.pause()) is None
    assert len(questions) == 4


def test_stops_are_distinct(job: Any) -> None:
    ranks = job(1)
    process = ranks.ranks[0].pid
    assert stop_id(process) is None
    seen = []
    for _ in range(3):
        ranks.stop(0)
        seen.append(stop_id(process))
        assert stop_id(process) == seen[-1]
        ranks.go_on(0)
    assert None not in seen
    assert len(set(seen)) == 3
