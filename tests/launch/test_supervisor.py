"""Supervision of rank processes, each independent of the others."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.commands import until
from tests.pool import RankPool
from trainwright.launch.ranks.supervisor import RankExit, Supervisor

# Longest time that anything here may take, in seconds; nothing does unless it hangs.
LIMIT = 60.0


def live(environment: Mapping[str, str], folder: Path) -> None:
    """Entry point of a test rank: report its start, then behave as HOW says."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN if environment["HOW"] == "deaf" else signal.SIG_DFL)
    (folder / f"{environment['RANK']}.{os.getpid()}").touch()
    if environment["HOW"] == "fail":
        sys.exit(3)
    if environment["HOW"] == "end":
        return
    time.sleep(LIMIT)
    sys.exit("nobody has ended this rank")


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Supervisor]:
    RankPool.warm()
    with Supervisor(live, (tmp_path,)) as supervisor:
        yield supervisor


def _start(ranks: Supervisor, how: str, rank: int) -> None:
    ranks.start_rank(rank, {"RANK": str(rank), "HOW": how})


def test_replacing_one_rank(ranks: Supervisor, tmp_path: Path) -> None:
    for rank in range(3):
        _start(ranks, "live", rank)
    first = [ranks.pid(rank) for rank in range(3)]
    os.kill(first[1], signal.SIGKILL)
    assert ranks.wait(LIMIT) == [RankExit(1, -signal.SIGKILL)]
    assert ranks.living == (0, 2)
    _start(ranks, "live", 1)
    assert ranks.living == (0, 1, 2)
    until((tmp_path / f"1.{ranks.pid(1)}").exists, "the start of rank 1")
    assert [ranks.pid(rank) for rank in (0, 2)] == [first[0], first[2]]
    with pytest.raises(ValueError, match=f"rank 0 lives as process {first[0]}"):
        _start(ranks, "live", 0)


def test_ending_ranks(ranks: Supervisor, tmp_path: Path) -> None:
    for rank, how in enumerate(("live", "deaf", "deaf")):
        _start(ranks, how, rank)
        until((tmp_path / f"{rank}.{ranks.pid(rank)}").exists, f"the start of rank {rank}")
    assert ranks.end((2,), grace=0.0) == [RankExit(2, -signal.SIGKILL, asked=True)]
    ended = ranks.end(ranks.living, grace=0.2)
    assert ended == [RankExit(0, -signal.SIGTERM, asked=True), RankExit(1, -signal.SIGKILL, asked=True)]
    assert not any(each.failed for each in ended)


def test_waiting_for_exits(ranks: Supervisor) -> None:
    assert ranks.wait() == []  # nobody to wait for
    _start(ranks, "end", 0)
    assert ranks.wait(LIMIT) == [RankExit(0, 0)]
    _start(ranks, "fail", 0)
    [ended] = ranks.wait(LIMIT)
    assert ended == RankExit(0, 3)
    assert ended.failed
    _start(ranks, "live", 0)
    assert ranks.wait(0.05) == []


def test_context_manager_kills_ranks(tmp_path: Path) -> None:
    RankPool.warm()
    with Supervisor(live, (tmp_path,)) as supervisor:
        _start(supervisor, "deaf", 0)
        pid = supervisor.pid(0)
    assert not Path(f"/proc/{pid}").exists()


@dataclass
class Found:
    """Result of a monitor."""

    rank: int
    reason: str = "it sleeps"
    report: str = "for long"


class Watcher:
    """Monitor that reports a hang at once."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pids: dict[int, int] = {}

    def environment(self, rank: int) -> dict[str, str]:
        return {"WATCHED": str(rank)}

    def watch(self, rank: int, pid: int) -> None:
        self.pids[rank] = pid

    def check(self) -> Found | None:
        return Found(self.rank)


def test_hanging_rank_is_killed(tmp_path: Path) -> None:
    RankPool.warm()
    watcher = Watcher(rank=1)
    with Supervisor(live, (tmp_path,), monitor=watcher) as ranks:
        for rank in range(2):
            _start(ranks, "live", rank)
        assert watcher.pids == {rank: ranks.pid(rank) for rank in range(2)}
        [ended] = ranks.wait(LIMIT)
        assert (ended.rank, ended.exit_code, ended.failed) == (1, -signal.SIGKILL, True)
        assert ended.hang == Found(1)
        assert ranks.living == (0,)
