"""Each kind of hang gives a report that names the right rank and what it waits for."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.command.project import run_command, write_project
from tests.faults import hanging
from tests.faults.hanging import NO_LIMITS, watched_ranks
from trainwright.launch.watchdog.monitor import DiagnosedHang

# Their server, from which the ranks of these tests fork too.
pytestmark = pytest.mark.usefixtures("ranks")
LAYOUTS: list[tuple[str, dict[str, Any], int]] = [
    ("ddp", {}, 2),
    ("zero3", {}, 2),
    ("pipeline", {"micro_batches": 2}, 2),
    ("hybrid", {"pipeline": 2, "shard": 2, "micro_batches": 2}, 4),
]


def first_line(found: DiagnosedHang) -> str:
    return found.report.splitlines()[0]


@pytest.mark.parametrize(("strategy", "options", "world_size"), LAYOUTS, ids=lambda value: str(value))
def test_a_lock_in_the_users_step(strategy: str, options: dict[str, Any], world_size: int) -> None:
    with watched_ranks(hanging.in_training_step, world_size, "wait_for_a_lock", strategy, options) as ranks:
        found = ranks.hang()
    assert found.rank == 1
    # The others wait for it, in a call that torch has recorded, or in a message from one stage to the next.
    assert re.search(r"rank 1 has not joined \w+ #\d+ .* of group|rank [023] has waited for other ranks", found.report)
    doing = r"rank 1 is in wait_for_a_lock at hanging.py:\d+, within \S*Faulty.training_step \(phase forward\), "
    assert re.search(doing + "waiting for a lock$", first_line(found))
    assert found.path is not None
    users = found.path.read_text().split("Rank 1 is in your lines (innermost first)\n")[1]
    assert "in wait_for_a_lock: lock.acquire()" in users.splitlines()[0]


def test_a_rank_that_is_stopped_is_found_whatever_the_limits() -> None:
    with watched_ranks(hanging.in_training_step, 2, "stop_by_signal", "zero3", {}, limits=NO_LIMITS) as ranks:
        found = ranks.hang()
    assert found.rank == 1
    assert re.search(r"rank 1 has not joined \w+ #\d+ .*, in which rank 0 has waited for \d+ s", first_line(found))
    assert "rank 1 is in phase forward, stopped by a signal (SIGSTOP)" in first_line(found)


def test_native_code_that_holds_pythons_lock() -> None:
    with watched_ranks(hanging.in_training_step, 2, "hold_the_gil", "ddp", {}) as ranks:
        found = ranks.hang()
    assert found.rank == 1
    assert "rank 1 has not joined all_reduce" in first_line(found)
    assert "does not let go of Python's lock (GIL)" in first_line(found)
    assert found.path is not None
    assert re.search(r'hanging.py", line \d+ in hold_the_gil', found.path.read_text().split("---- rank 0")[0])


def test_a_slow_hook_is_named() -> None:
    with watched_ranks(hanging.in_hook, 2, "sleep_on") as ranks:
        found = ranks.hang()
    assert found.rank == 1
    assert "within FaultyHook.on_train_batch_end (phase hooks), sleeping" in first_line(found)
    assert re.search(
        r"rank 1 has not joined all_reduce #\d+ \(6,285 x float32\) of group 'all ranks' \[0, 1\]", found.report
    )


def test_a_data_set_that_blocks() -> None:
    with watched_ranks(hanging.with_blocking_data, 2, 0) as ranks:
        found = ranks.hang()
    assert found.rank == 1
    assert re.search(
        r"rank 1 is in BlockingTokens.__getitem__ at hanging.py:\d+ \(phase data\), sleeping", found.report
    )


def test_a_worker_of_a_data_loader_that_blocks() -> None:
    with watched_ranks(hanging.with_blocking_data, 2, 2) as ranks:
        found = ranks.hang()
    assert found.rank == 1
    assert "(phase data), waiting for a worker process of its data loader" in first_line(found)
    assert found.path is not None
    assert re.search(r"child process \d+ .*\n(.*\n)*?.*line \d+ in __getitem__", found.path.read_text())


def test_another_call_than_the_others() -> None:
    with watched_ranks(hanging.with_own_calls, 2, "other_kind", "ddp") as ranks:
        found = ranks.hang()
    called = r"rank {} has called {} \(3 x float32\) in \S*other_kind at hanging.py:\d+, within \S+ as number"
    assert re.search(called.format(found.rank, "all_gather" if found.rank else "all_reduce"), first_line(found))
    assert "where rank" in first_line(found)


def test_a_call_that_one_rank_leaves_out() -> None:
    with watched_ranks(hanging.with_own_calls, 2, "left_out", "zero3") as ranks:
        found = ranks.hang()
    assert re.search(r"all_reduce (#\d+ )?\(3 x float32\)", first_line(found))
    # On a slow machine the other rank is already in a call of another group, which identifies the culprit.
    assert re.search("one of them left a call out|rank 1 left out", first_line(found))


def test_a_call_left_out_of_another_group() -> None:
    with watched_ranks(hanging.left_out_of_another_group, 2) as ranks:
        found = ranks.hang()
    assert found.rank == 1
    assert re.search(
        r"rank 1 left out all_reduce #\d+ \(5 x float32\) of group 'metrics' \[0, 1\], in which rank 0 has waited",
        first_line(found),
    )
    assert "rank 1 is in" in first_line(found)
    assert "of group 'all ranks' [0, 1]" in first_line(found)


def test_a_call_of_another_size_which_ends_a_rank() -> None:
    """gloo ends the process that receives more than it asked for; the other one loses its connection."""
    with watched_ranks(hanging.with_own_calls, 2, "other_size", "ddp") as ranks:
        explanation = ranks.explanation()
    assert re.search(
        r"rank \d crashed in compiled code: Aborted \(other_size at hanging.py:\d+\); rank \d was in all_reduce #\d+ "
        r"\((7|100) x float32\) of group 'all ranks' \[0, 1\] in OwnCalls.other_size at hanging.py:\d+; the stacks: ",
        explanation,
    )


def test_a_rank_that_saves_is_no_hang() -> None:
    """The other waits for it, longer than anything it waited for before."""
    with watched_ranks(hanging.saving_slowly, 2, 3.0) as ranks:
        ranks.come_to_the_end()


def test_a_script_under_any_launcher_is_watched_by_a_process_of_its_own() -> None:
    with watched_ranks(hanging.in_hook, 2, "stop_by_signal", NO_LIMITS, limits=None) as ranks:
        assert ranks.first_exit_code(1) == -signal.SIGKILL
        printed = ranks.printed(0)
    assert "rank 1 is in phase hooks, stopped by a signal (SIGSTOP)" in printed
    assert "Ending rank 1 (SIGKILL)." in printed
    assert "rank 1 has not joined all_reduce" in Path("logs/hang_1.txt").read_text()


def test_the_process_that_watches_a_script_ends_with_it() -> None:
    """That none is left is what every test is looked at for."""
    with watched_ranks(hanging.in_hook, 2, "nothing", limits=None) as ranks:
        assert [ranks.first_exit_code(rank) for rank in range(2)] == [0, 0]


def test_a_command_resumes_after_a_hang(tmp_path: Path) -> None:
    words = ("recipe=mine", "strategy=ddp", "devices=2", "monitor=none", "logger=csv", "max_steps=12", "max_epochs=2")
    found = ("run_dir=run", "launch=resilient", "launch.hang_floor_seconds=600", "checkpoint=last")
    conf = write_project(tmp_path)
    done = run_command("fit", "--config-dir", str(conf), *words, *found, "+inject='stop(rank=1, at_step=5)'")
    assert done.returncode == 0, done.stdout
    assert "rank 1 hangs: in phase hooks, stopped by a signal (SIGSTOP)" in done.stdout
    assert "restart 1" in done.stdout
    assert "rank 1 has not joined all_reduce" in Path("run/logs/hang_1.txt").read_text()
