"""Diagnoses of hangs: each names the culprit and what it waits for."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.command.project import run_command, write_project
from tests.faults import hanging
from tests.faults.hanging import LIMITS, NO_LIMITS, Ranks
from tests.pool import RankPool
from trainwright.launch.watchdog.boxes import HangLimits
from trainwright.launch.watchdog.monitor import DiagnosedHang


@dataclass(frozen=True)
class Hang:
    """A hang and its report.

    Attributes:
        case, args, world_size, limits: of :class:`~tests.faults.hanging.Ranks`.
        first: patterns of the first line of the report.
        report: patterns of the whole report.
        file: patterns of the file with the report and all stacks.
        rank: culprit; ``None``: either of the two.
    """

    case: Callable[..., Any]
    args: tuple[Any, ...] = ()
    first: tuple[str, ...] = ()
    report: tuple[str, ...] = ()
    file: tuple[str, ...] = ()
    rank: int | None = 1
    world_size: int = 2
    limits: HangLimits = LIMITS


def waits_for_a_lock(strategy: str, options: dict[str, Any], world_size: int = 2) -> Hang:
    return Hang(
        hanging.in_training_step,
        ("wait_for_a_lock", strategy, options),
        first=(
            r"rank 1 is in wait_for_a_lock at hanging.py:\d+, within \S*Faulty.training_step \(phase forward\), "
            r"waiting for a lock$",
        ),
        # The others wait for it, in a call that torch has recorded, or in a message from one stage to the next.
        report=(r"rank 1 has not joined \w+ #\d+ .* of group|rank [023] has waited for other ranks",),
        file=(r"Rank 1 is in your lines \(innermost first\)\n.*in wait_for_a_lock: lock.acquire\(\)",),
        world_size=world_size,
    )


HANGS = {
    "a lock in the user's step, ddp": waits_for_a_lock("ddp", {}),
    "a lock in the user's step, zero3": waits_for_a_lock("zero3", {}),
    "a lock in the user's step, pipeline": waits_for_a_lock("pipeline", {"micro_batches": 2}),
    "a lock in the user's step, hybrid": waits_for_a_lock(
        "hybrid", {"pipeline": 2, "shard": 2, "micro_batches": 2}, world_size=4
    ),
    "stopped by a signal, whatever the limits": Hang(
        hanging.in_training_step,
        ("stop_by_signal", "zero3", {}),
        first=(
            r"rank 1 has not joined \w+ #\d+ .*, in which rank 0 has waited for \d+ s",
            r"rank 1 is in phase forward, stopped by a signal \(SIGSTOP\)",
        ),
        limits=NO_LIMITS,
    ),
    "native code that holds the GIL": Hang(
        hanging.in_training_step,
        ("hold_the_gil", "ddp", {}),
        first=("rank 1 has not joined all_reduce", r"does not let go of Python's lock \(GIL\)"),
        file=(r'(?s)\A(?:(?!---- rank 0).)*hanging.py", line \d+ in hold_the_gil',),
    ),
    "a slow hook": Hang(
        hanging.in_hook,
        ("sleep_on",),
        first=(r"within FaultyHook.on_train_batch_end \(phase hooks\), sleeping",),
        report=(r"rank 1 has not joined all_reduce #\d+ \(6,285 x float32\) of group 'all ranks' \[0, 1\]",),
    ),
    "a data set that blocks": Hang(
        hanging.with_blocking_data,
        (0,),
        report=(r"rank 1 is in BlockingTokens.__getitem__ at hanging.py:\d+ \(phase data\), sleeping",),
    ),
    "a worker of a data loader that blocks": Hang(
        hanging.with_blocking_data,
        (2,),
        first=(r"\(phase data\), waiting for a worker process of its data loader",),
        file=(r"child process \d+ .*\n(.*\n)*?.*line \d+ in __getitem__",),
    ),
    "another collective than the others'": Hang(
        hanging.with_own_calls,
        ("other_kind", "ddp"),
        first=(
            r"rank (1 has called all_gather|0 has called all_reduce) \(3 x float32\) in \S*other_kind at "
            r"hanging.py:\d+, within \S+ as number",
            "where rank",
        ),
        rank=None,
    ),
    "a collective left out": Hang(
        hanging.with_own_calls,
        ("left_out", "zero3"),
        first=(
            r"all_reduce (#\d+ )?\(3 x float32\)",
            # On a slow machine the other rank is already in a call of another group, which identifies the culprit.
            "one of them left a call out|rank 1 left out",
        ),
        rank=None,
    ),
    "a collective of another group left out": Hang(
        hanging.left_out_of_another_group,
        first=(
            r"rank 1 left out all_reduce #\d+ \(5 x float32\) of group 'metrics' \[0, 1\], in which rank 0 has waited",
            "rank 1 is in",
            r"of group 'all ranks' \[0, 1\]",
        ),
    ),
}


@pytest.fixture(scope="module")
def diagnosis_of(
    pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[DiagnosedHang | None, str]]:
    """The hang of a name of :data:`HANGS`, and what rank 0 printed; several run at once, since they mostly wait."""
    folder = tmp_path_factory.mktemp("hangs")

    def diagnose(number: int, hang: Hang) -> tuple[DiagnosedHang | None, str]:
        with Ranks(hang.case, hang.args, folder / f"{number}", hang.world_size, hang.limits) as ranks:
            return ranks.wait(), ranks.printed(0)

    with ThreadPoolExecutor(4) as threads:
        futures = {name: threads.submit(diagnose, number, hang) for number, (name, hang) in enumerate(HANGS.items())}
    return lambda name: futures[name].result()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_diagnosed(diagnosis_of: Callable[[str], tuple[DiagnosedHang | None, str]], name: str) -> None:
    hang, (found, printed) = HANGS[name], diagnosis_of(name)
    assert found is not None, printed
    whole = Path(found.report.rpartition(": ")[2]).read_text()
    assert found.rank == hang.rank or hang.rank is None
    texts = (found.report.splitlines()[0], hang.first), (found.report, hang.report), (whole, hang.file)
    for text, patterns in texts:
        for pattern in patterns:
            assert re.search(pattern, text), f"{pattern}\n{text}"


def test_a_call_of_another_size_which_ends_a_rank(pool: RankPool, tmp_path: Path) -> None:
    """gloo ends the process that receives more than it asked for; the other one loses its connection."""
    with Ranks(hanging.with_own_calls, ("other_size", "ddp"), tmp_path, 2, LIMITS) as ranks:
        assert ranks.wait() is None
        explanation = ranks.monitor.explain()
    assert explanation is not None, ranks.printed(0)
    assert re.search(
        r"rank \d crashed in compiled code: Aborted \(other_size at hanging.py:\d+\); rank \d was in all_reduce #\d+ "
        r"\((7|100) x float32\) of group 'all ranks' \[0, 1\] in OwnCalls.other_size at hanging.py:\d+; the stacks: ",
        explanation,
    )


@pytest.mark.thorough
def test_a_rank_that_saves_is_no_hang(pool: RankPool, tmp_path: Path) -> None:
    """The other one waits for it, longer than for anything before."""
    with Ranks(hanging.saving_slowly, (3.0,), tmp_path, 2, LIMITS) as ranks:
        found = ranks.wait()
        assert found is None, found.report
        assert ranks.exit_codes() == [0, 0], ranks.printed(0)


@pytest.mark.thorough
def test_a_script_under_any_launcher_is_watched_by_a_process_of_its_own(pool: RankPool, tmp_path: Path) -> None:
    with Ranks(hanging.in_hook, ("stop_by_signal", NO_LIMITS), tmp_path, 2, None) as ranks:
        ranks.processes[1].join(hanging.LONGEST)
        assert ranks.exit_codes()[1] == -signal.SIGKILL, ranks.printed(1)
        printed = ranks.printed(0)
    assert "rank 1 is in phase hooks, stopped by a signal (SIGSTOP)" in printed
    assert "Ending rank 1 (SIGKILL)." in printed
    assert "rank 1 has not joined all_reduce" in (tmp_path / "logs" / "hang_1.txt").read_text()


def test_the_process_that_watches_a_script_ends_with_it(pool: RankPool, tmp_path: Path) -> None:
    """Every test fails that leaves a process."""
    with Ranks(hanging.in_hook, ("nothing",), tmp_path, 2, None) as ranks:
        assert ranks.wait() is None
        assert ranks.exit_codes() == [0, 0], ranks.printed(0)


@pytest.mark.thorough
def test_a_command_resumes_after_a_hang(pool: RankPool, tmp_path: Path) -> None:
    words = ("recipe=mine", "strategy=ddp", "devices=2", "monitor=none", "logger=csv", "max_steps=12", "max_epochs=2")
    words += ("run_dir=run", "launch=resilient", "launch.hang_floor_seconds=600", "checkpoint=last", "report=false")
    conf = write_project(tmp_path)
    done = run_command("fit", "--config-dir", str(conf), *words, "+inject='stop(rank=1, at_step=5)'")
    assert done.returncode == 0, done.stdout
    assert "rank 1 hangs: in phase hooks, stopped by a signal (SIGSTOP)" in done.stdout
    assert "restart 1" in done.stdout
    assert "rank 1 has not joined all_reduce" in Path("run/logs/hang_1.txt").read_text()
