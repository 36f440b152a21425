"""Decisions of the restart policy, and the log of restarts."""

from pathlib import Path

import pytest

from trainwright.launch.recovery.restarts import AttemptFailure, Restart, RestartLog, RestartPolicy


def _killed(step: int | None, start_step: int | None = 0, rank: int = 1) -> AttemptFailure:
    return AttemptFailure(rank, "SIGKILL", step=step, start_step=start_step)


def _raised(step: int | None, start_step: int | None = 0, rank: int = 0, message: str = "boom") -> AttemptFailure:
    return AttemptFailure(rank, "ValueError", message, step, start_step, raised=True)


def test_progress_restarts_without_limit_or_wait() -> None:
    policy = RestartPolicy(max_restarts=None)
    decisions = [policy.decide(_killed(step, start_step=step - 3)) for step in range(5, 2000, 5)]
    assert decisions == [Restart(number, 0.0) for number in range(1, len(decisions) + 1)]


def test_backoff() -> None:
    policy = RestartPolicy(max_restarts=None, backoff_seconds=1.0, same_failure_limit=100)
    waits = []
    for rank in range(10):  # another rank each time: not the same failure
        decision = policy.decide(_killed(7, start_step=7, rank=rank))
        assert isinstance(decision, Restart)
        waits.append(decision.seconds)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0]
    assert policy.decide(_killed(9, start_step=7)) == Restart(11, 0.0)
    assert policy.decide(_killed(8, start_step=7)) == Restart(12, 1.0)  # trained, but no further than before


def test_crash_loop() -> None:
    policy = RestartPolicy(max_restarts=None, same_failure_limit=3)
    texts = [f"bad value at 0x7f{n}3 in /tmp/x{n}/part {n}" for n in range(3)]
    decisions = [policy.decide(_raised(12, 10, rank, text)) for rank, text in enumerate(texts)]
    assert [type(each) for each in decisions] == [Restart, Restart, str]
    assert "crash loop: the same failure (ValueError at step 12) occurred 3 times in a row" in str(decisions[-1])


@pytest.mark.parametrize(
    "other", [_raised(13, 10), _raised(12, 10, message="another"), _killed(12, 10)], ids=["step", "message", "kind"]
)
def test_different_failures_are_no_crash_loop(other: AttemptFailure) -> None:
    policy = RestartPolicy(max_restarts=None, same_failure_limit=2)
    for setback in (_raised(12, 10), other, _raised(12, 10)):
        assert isinstance(policy.decide(setback), Restart)


def test_kills_of_different_ranks_differ() -> None:
    policy = RestartPolicy(max_restarts=None, same_failure_limit=2)
    assert isinstance(policy.decide(_killed(5, rank=0)), Restart)
    assert isinstance(policy.decide(_killed(5, rank=1)), Restart)
    assert isinstance(policy.decide(_killed(5, rank=1)), str)


def test_error_before_the_first_step_is_final() -> None:
    for setback in (_raised(None, None), _raised(100, 100)):
        decision = RestartPolicy(max_restarts=None).decide(setback)
        assert "before its first step" in str(decision)
    assert isinstance(RestartPolicy(max_restarts=None).decide(_killed(None, None)), Restart)


def test_error_at_the_start_of_a_restart_is_retried() -> None:
    policy = RestartPolicy(max_restarts=None)
    policy.decide(_killed(5))
    decision = policy.decide(_raised(None, None, message="Connection refused"))
    assert decision == Restart(2, 1.0)


def test_max_restarts() -> None:
    policy = RestartPolicy(max_restarts=2)
    decisions = [policy.decide(_killed(step)) for step in (1, 2, 3)]
    assert decisions[:2] == [Restart(1, 0.0), Restart(2, 0.0)]
    assert "launch.max_restarts=2" in str(decisions[2])
    assert RestartPolicy(max_restarts=0).is_off
    assert not RestartPolicy(max_restarts=None).is_off


def test_forgiven_failures() -> None:
    policy = RestartPolicy(max_restarts=None, same_failure_limit=2)
    policy.decide(_killed(None, None))
    policy.forgive()
    assert policy.decide(_killed(None, None)) == Restart(2, 1.0)


def test_loss_guard_stop_is_final() -> None:
    decision = RestartPolicy(max_restarts=None).decide(AttemptFailure(0, "DivergedError", "", 12, 3, raised=True))
    assert "the loss guard ended it" in str(decision)


def test_restart_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RestartLog(tmp_path)
    log.write("rank 1 failed", "Traceback: boom")
    log.write("restart 1")
    assert capsys.readouterr().err == "trainwright: rank 1 failed\ntrainwright: restart 1\n"
    written = log.path.read_text()
    assert [word in written for word in ("rank 1 failed\n    Traceback: boom\n", "restart 1\n")] == [True, True]


def test_unwritable_restart_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("no folder")
    RestartLog(tmp_path).write("rank 1 failed", "Traceback: boom")
    said = capsys.readouterr().err
    assert said.startswith("trainwright: rank 1 failed\n")
    assert "restarts.log cannot be written" in said
    assert "Traceback: boom" in said
