"""Replacement of lost ranks while the others continue."""

import signal
from pathlib import Path

import pytest

from trainwright.core.failures.failure import FailureRecorder, RankError
from trainwright.core.failures.records import StepRecord
from trainwright.launch.local.local import INCARNATION, Replacements
from trainwright.launch.ranks.supervisor import RankExit
from trainwright.launch.recovery.restarts import RestartLog, RestartPolicy

KILLED = -int(signal.SIGKILL)


def replacements(folder: Path, policy: RestartPolicy | None = None) -> Replacements:
    log = RestartLog(folder)
    return Replacements((1, 2), 3, folder, folder, policy or RestartPolicy(None, backoff_seconds=0.0), log)


def told(folder: Path) -> str:
    return (folder / "logs" / "restarts.log").read_text(encoding="utf-8")


def test_replacement_and_incarnation(tmp_path: Path) -> None:
    StepRecord(tmp_path, 1).write(5)
    lost = replacements(tmp_path)
    assert lost.pause is None
    assert lost.take([RankExit(1, KILLED)], start_step=0)
    assert lost.pause == 0.0
    assert lost.due() == [(1, {INCARNATION: "1"})]
    assert lost.due() == []
    StepRecord(tmp_path, 1).write(7)
    assert lost.take([RankExit(1, KILLED), RankExit(2, KILLED)], start_step=0)
    assert lost.due() == [(1, {INCARNATION: "2"}), (2, {INCARNATION: "1"})]
    assert "rank 1 was ended by SIGKILL (at step 5)" in told(tmp_path)
    assert "rank 1 is restarted and rejoins" in told(tmp_path)


@pytest.mark.parametrize(("failed", "start_step"), [
    ([RankExit(0, KILLED)], 0), ([RankExit(1, KILLED), RankExit(0, KILLED)], 0), ([RankExit(1, KILLED)], None),
], ids=["not replaceable", "one of them is not", "before training"])  # fmt: skip
def test_irreplaceable_ranks(tmp_path: Path, failed: list[RankExit], start_step: int | None) -> None:
    lost = replacements(tmp_path)
    assert not lost.take(failed, start_step)
    assert lost.due() == []


def test_simultaneous_failures_are_reported_separately(tmp_path: Path) -> None:
    for rank, text in ((1, "the disk of one"), (2, "the lamp of two")):
        StepRecord(tmp_path, rank).write(3)
        FailureRecorder(tmp_path, rank).record(ValueError(text))
    assert replacements(tmp_path).take([RankExit(1, 1), RankExit(2, 1)], start_step=0)
    lines = [line for line in told(tmp_path).splitlines() if " failed with " in line and not line.startswith(" ")]
    assert ["rank 1" in line and "the disk of one" in line for line in lines] == [True, False]
    assert ["rank 2" in line and "the lamp of two" in line for line in lines] == [False, True]
    # A later failure is not blamed on these.
    assert not list(tmp_path.glob("*.json"))


def test_policy_limits_replacements(tmp_path: Path) -> None:
    lost = replacements(tmp_path, RestartPolicy(1, backoff_seconds=0.0))
    StepRecord(tmp_path, 1).write(3)
    assert lost.take([RankExit(1, KILLED)], start_step=0)
    StepRecord(tmp_path, 1).write(9)
    with pytest.raises(RankError, match=r"(?s)rank 1 of 3 was ended by SIGKILL.*launch\.max_restarts=1"):
        lost.take([RankExit(1, KILLED)], start_step=0)


def test_backoff_of_replacements(tmp_path: Path) -> None:
    lost = replacements(tmp_path, RestartPolicy(None, same_failure_limit=9, backoff_seconds=50.0))
    assert lost.take([RankExit(1, KILLED)], start_step=0)
    assert lost.pause is not None
    assert lost.pause > 40
    assert lost.due() == []
