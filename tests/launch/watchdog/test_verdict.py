"""Verdicts about hangs, from evidence about each rank."""

from typing import Any

import pytest

from trainwright.core.run import phases
from trainwright.launch.watchdog import evidence
from trainwright.launch.watchdog.answers import Answer
from trainwright.launch.watchdog.boxes import Progress
from trainwright.launch.watchdog.calls import Call, Group
from trainwright.launch.watchdog.evidence import Child, Evidence
from trainwright.launch.watchdog.report.report import first_lines, report_of
from trainwright.launch.watchdog.report.stacks import Frame, Thread
from trainwright.launch.watchdog.report.verdict import HangVerdict, differing_calls, judge

LIMIT, SLOW = 10.0, 100.0
IN_TORCH = Frame("/x/torch/distributed/distributed_c10d.py", 1, "all_reduce", "work.wait()", False)
IN_STEP = Frame("/me/user.py", 12, "Net.training_step", "self.lock.acquire()", True, holds_lock=True)
IN_LOOP = Frame("/me/user.py", 20, "Net.training_step", "x + 1", True)


def call(number: int, name: str = "all_reduce", size: int = 512, pending: bool = True, group: str = "1") -> Call:
    return Call(group, number, name, ((size,),), ("float32",), pending, 31.0 if pending else 40.0)


def rank(
    number: int,
    *calls: Call,
    frame: Frame = IN_TORCH,
    stalled: float = 31.0,
    groups: dict[str, tuple[int, ...]] | None = None,
    state: str = "S",
    on_accelerator: bool = False,
    answers: bool = True,
    state_of_process: str = "S",
    **more: Any,
) -> Evidence:
    box = {"phase": phases.FORWARD, "step": 5, "micro_batches": 6, "running": True}
    box |= {name: more.pop(name) for name in list(more) if name in box}
    progress = Progress(process=100 + number, rank=number, changes=1, longest={}, **box)
    known = {name: Group(name, "replicate", ranks) for name, ranks in (groups or {"1": (0, 1)}).items()}
    thread = Thread("MainThread", True, state, (frame,))
    answer = Answer((thread,), calls, known, on_accelerator) if answers else None
    return Evidence(progress, stalled, LIMIT, SLOW, answer, state=state_of_process, **more)


def verdict_on(*ranks: Evidence, seen_before: bool = False) -> HangVerdict:
    found = judge(ranks, seen_before)
    assert found is not None, "no rank is blamed"
    return found


COMPILING = Frame("/x/torch/_dynamo/convert_frame.py", 1, "_compile", "", False)
DEBUGGER = Frame("/usr/lib/pdb.py", 1, "Pdb.interaction", "", False)
ASLEEP = Frame("/me/user.py", 3, "wait", "time.sleep(9)", True)
ITEM = Frame("/me/user.py", 30, "Net.training_step", "loss.item()", True)
THREE, FOUR, TWO = {"1": (0, 1, 2)}, {"1": (0, 1, 2, 3)}, {"1": (0, 1), "2": (0, 1)}
WAITING = rank(0, call(57))


@pytest.mark.parametrize(("ranks", "seen_before"), [
    ([WAITING, rank(1, frame=IN_LOOP, stalled=5.0, state="R", phase=phases.SAVING)], True),
    ([WAITING, rank(1, frame=COMPILING)], True),
    ([WAITING, rank(1, frame=DEBUGGER, stalled=9999.0)], True),
    ([WAITING, rank(1, answers=False, state_of_process="t")], True),
    # Stopped for a moment, or continued meanwhile.
    ([rank(0, call(57), stalled=1.5), rank(1, answers=False, stalled=1.5, state_of_process="T")], False),
    ([rank(0, call(57), stalled=1.5), rank(1, answers=False, stalled=1.5, halted=True)], False),
    # All are stopped: the job is suspended.
    ([rank(number, answers=False, state_of_process="T") for number in (0, 1)], True),
    ([rank(0, call(57, "alltoall_base", 3)), rank(1, call(57, "alltoall_base", 5))], False),
    # The rank of the other machine may be saving, which only its own monitor knows.
    ([rank(number, call(57), groups=THREE) for number in (0, 1)], True),
])  # fmt: skip
def test_no_rank_is_blamed(ranks: list[Evidence], seen_before: bool) -> None:
    assert judge(ranks, seen_before) is None


@pytest.mark.parametrize(("ranks", "seen_before", "expected"), [
    ([WAITING, rank(1, call(56, pending=False), frame=IN_STEP)], False, (1, 1, "waiting for a lock")),
    ([WAITING, rank(1, frame=IN_LOOP, state="R")], False, (1, 1, "computing")),
    ([rank(0, call(57), stalled=120.0), rank(1, frame=COMPILING, stalled=120.0)], False, (1, 1, "compiling")),
    # Certain causes come before likely ones.
    *(
        (
            [
                rank(0, call(57), groups=THREE),
                rank(1, frame=ASLEEP, stalled=50.0, groups=THREE),
                rank(2, answers=False, state_of_process=state, halted=state == "T"),
            ],
            False,
            (2, 2, kind),
        )
        for state, kind in (("T", "stopped by a signal"), ("D", "waiting in the kernel"))
    ),
    # Of two ranks that stand still, the one that others wait for.
    ([WAITING, rank(1, frame=IN_STEP), rank(2, frame=IN_STEP, stalled=90.0)], False, (1, 1, "waiting for a lock")),
    # On an accelerator any line may wait for a call.
    (
        [rank(0, call(57), frame=ITEM, state="R", on_accelerator=True), rank(1, frame=IN_STEP, on_accelerator=True)],
        False,
        (1, 1, "waiting for a lock"),
    ),
    # Of two different calls, the one of the rank ahead.
    (
        [rank(0, call(57, "all_gather"), phase=phases.FORWARD), rank(1, call(57), phase=phases.BACKWARD)],
        False,
        (1, 1, "where others called all_gather"),
    ),
    ([WAITING, rank(1, call(56, pending=False), running=False)], True, (1, 0, "has ended its run")),
    ([rank(number, call(57), groups=THREE, stalled=120.0) for number in (0, 1)], True, (2, 0, "waits for other")),
    ([rank(0), rank(1, stalled=40.0)], True, (1, 1, "all ranks wait for each other")),
])  # fmt: skip
def test_blamed_rank(ranks: list[Evidence], seen_before: bool, expected: tuple[int, int, str]) -> None:
    found = verdict_on(*ranks, seen_before=seen_before)
    blamed, ended, reason = expected
    assert (found.rank, found.ends) == (blamed, ended)
    assert reason in found.reason


def test_waiting_on_an_accelerator() -> None:
    kinds = [rank(0, call(57), frame=ITEM, state="R", on_accelerator=each).wait.kind for each in (True, False)]
    assert kinds == [evidence.COMMUNICATION, evidence.COMPUTING]


def test_missing_rank_with_call_and_line() -> None:
    found = verdict_on(WAITING, rank(1, call(56, pending=False), frame=IN_STEP))
    assert found.sentence == (
        "rank 1 has not joined all_reduce #57 (512 x float32) of group 'replicate' [0, 1], in which rank 0 has waited "
        "for 31 s; rank 1 is in Net.training_step at user.py:12 (phase forward), waiting for a lock"
    )
    assert found.reason == "in Net.training_step at user.py:12 (phase forward), waiting for a lock"


def test_stopped_rank() -> None:
    others = rank(0, call(57), groups=THREE, stalled=1.5), rank(2, frame=IN_LOOP, state="R", stalled=1.5)
    found = verdict_on(*others, rank(1, answers=False, stalled=1.5, state_of_process="T", halted=True))
    assert (found.rank, found.ends) == (1, 1)
    assert found.sentence == (
        "rank 1 has not joined all_reduce #57 (512 x float32) of group 'replicate' [0, 1, 2], in which rank 0 has "
        "waited for 31 s; rank 1 is in phase forward, stopped by a signal (SIGSTOP)"
    )
    assert found.reason == "in phase forward, stopped by a signal (SIGSTOP)"


def test_mismatch_of_a_minority() -> None:
    ranks = [rank(number, call(57), groups=FOUR) for number in (0, 1, 3)]
    found = verdict_on(*ranks, rank(2, call(57, size=100), groups=FOUR))
    assert found.rank == 2
    assert "rank 2 has called all_reduce (100 x float32)" in found.sentence
    assert (
        "number 57 of group 'replicate' [0, 1, 2, 3], where ranks 0, 1, 3 have called all_reduce (512" in found.sentence
    )


def test_skipped_call() -> None:
    before = call(56, pending=False), call(2, "broadcast", group="2", pending=False)
    behind = rank(0, *before, call(57), groups=TWO, phase=phases.BACKWARD)
    ahead = rank(1, *before, call(3, "broadcast", group="2"), groups=TWO, phase=phases.HOOKS)
    assert judge([behind, ahead]) is None
    found = verdict_on(behind, ahead, seen_before=True)
    assert found.rank == 1
    assert found.sentence.startswith("rank 1 left out all_reduce #57")
    assert found.sentence.endswith("in broadcast #3 (512 x float32) of group 'replicate' [0, 1]")


def test_extra_call() -> None:
    before = call(56, pending=False)
    backward = rank(0, before, call(57), groups=TWO, phase=phases.BACKWARD)
    alone = rank(1, before, call(1, "barrier", group="2"), groups=TWO, phase=phases.FORWARD)
    found = verdict_on(backward, alone, seen_before=True)
    assert found.rank == 1
    assert found.sentence.startswith("rank 1 has waited for 31 s in barrier #1")
    assert "rank 0 has waited for 31 s in all_reduce #57" in found.sentence


def test_stopped_data_loader_worker() -> None:
    loader = Frame("/x/torch/utils/data/dataloader.py", 1, "_BaseDataLoaderIter.__next__", "", False)
    found = verdict_on(WAITING, rank(1, frame=loader, children=(Child(77, "python", "T"),)))
    assert found.sentence.endswith("its data loader: worker process 77 is stopped by a signal (SIGSTOP)")


def test_calls_of_failed_ranks() -> None:
    done = [call(number, pending=False) for number in (55, 56)]
    failed = [rank(0, *done, call(57, pending=False)), rank(1, *done, call(57, size=100, pending=False))]
    assert "as number 57 of group 'replicate' [0, 1]" in str(differing_calls(failed))
    assert differing_calls([rank(0, *done), rank(1, *done, call(57))]) is None


def test_report() -> None:
    ranks = [WAITING, rank(1, call(56, pending=False), frame=IN_STEP)]
    found = verdict_on(*ranks)
    report = report_of(found, ranks)
    lines = first_lines(report).splitlines()
    assert lines[0] == f"Hang: {found.sentence}"
    assert lines[2].startswith("  rank 0: phase forward, step 5, micro-batch 6, no progress")
    assert report.index("Rank 1 is in your lines") < report.index("---- rank 1") < report.index("---- rank 0")
    assert "  /me/user.py:12 in Net.training_step: self.lock.acquire()" in report
    assert "all_reduce #57 (512 x float32) of group 'replicate' [0, 1]: PENDING" in report
