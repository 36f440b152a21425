"""When a failure is followed by a restart, and when a run is given up: pure decisions."""

import pytest

from trainwright.launch.recovery.restarts import Restart, RestartPolicy, Setback, StopRestarting


def _killed(step: int | None, begun: int | None = 0, rank: int = 1) -> Setback:
    return Setback(rank, "SIGKILL", step=step, begun=begun)


def _raised(step: int | None, begun: int | None = 0, rank: int = 0, message: str = "boom") -> Setback:
    return Setback(rank, "ValueError", message, step, begun, raised=True)


def test_a_run_that_gets_on_is_restarted_for_ever_and_at_once() -> None:
    policy = RestartPolicy(max_restarts=None)
    decisions = [policy.decide(_killed(step, begun=step - 3)) for step in range(5, 2000, 5)]
    assert decisions == [Restart(number, 0.0) for number in range(1, len(decisions) + 1)]


def test_the_wait_doubles_without_progress_to_a_minute_and_is_gone_after_it() -> None:
    policy = RestartPolicy(max_restarts=None, backoff_seconds=1.0, same_failure_limit=100)
    waits = []
    for rank in range(10):  # another rank each time: not the same failure
        decision = policy.decide(_killed(7, begun=7, rank=rank))
        assert isinstance(decision, Restart)
        waits.append(decision.seconds)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0]
    assert policy.decide(_killed(9, begun=7)) == Restart(11, 0.0)
    assert policy.decide(_killed(8, begun=7)) == Restart(12, 1.0)  # trained, but no further than before


def test_a_crash_loop_ends_the_run() -> None:
    policy = RestartPolicy(max_restarts=None, same_failure_limit=3)
    texts = [f"bad value at 0x7f{n}3 in /tmp/x{n}/part {n}" for n in range(3)]
    decisions = [policy.decide(_raised(12, 10, rank, text)) for rank, text in enumerate(texts)]
    assert [type(each) for each in decisions] == [Restart, Restart, StopRestarting]
    assert isinstance(decisions[-1], StopRestarting)
    assert "crash loop: the same failure (ValueError at step 12) came 3 times in a row" in decisions[-1].reason


@pytest.mark.parametrize(
    "other", [_raised(13, 10), _raised(12, 10, message="another"), _killed(12, 10)], ids=["step", "message", "kind"]
)
def test_another_failure_between_is_no_loop(other: Setback) -> None:
    policy = RestartPolicy(max_restarts=None, same_failure_limit=2)
    for setback in (_raised(12, 10), other, _raised(12, 10)):
        assert isinstance(policy.decide(setback), Restart)


def test_processes_killed_on_different_ranks_are_different_failures() -> None:
    policy = RestartPolicy(max_restarts=None, same_failure_limit=2)
    assert isinstance(policy.decide(_killed(5, rank=0)), Restart)
    assert isinstance(policy.decide(_killed(5, rank=1)), Restart)
    assert isinstance(policy.decide(_killed(5, rank=1)), StopRestarting)


def test_a_mistake_before_the_first_step_is_told_at_once() -> None:
    for setback in (_raised(None, None), _raised(100, 100)):
        decision = RestartPolicy(max_restarts=None).decide(setback)
        assert isinstance(decision, StopRestarting)
        assert "before its first step" in decision.reason
    assert isinstance(RestartPolicy(max_restarts=None).decide(_killed(None, None)), Restart)


def test_an_exception_at_the_start_of_a_restart_may_pass() -> None:
    policy = RestartPolicy(max_restarts=None)
    policy.decide(_killed(5))
    decision = policy.decide(_raised(None, None, message="Connection refused"))
    assert decision == Restart(2, 1.0)


def test_restarts_are_counted() -> None:
    policy = RestartPolicy(max_restarts=2)
    decisions = [policy.decide(_killed(step)) for step in (1, 2, 3)]
    assert decisions[:2] == [Restart(1, 0.0), Restart(2, 0.0)]
    assert isinstance(decisions[2], StopRestarting)
    assert "launch.max_restarts=2" in decisions[2].reason
    assert RestartPolicy(max_restarts=0).is_off
    assert not RestartPolicy(max_restarts=None).is_off


def test_what_was_caused_by_a_device_that_is_gone_is_forgiven() -> None:
    policy = RestartPolicy(max_restarts=None, same_failure_limit=2)
    policy.decide(_killed(None, None))
    policy.forgive()
    assert policy.decide(_killed(None, None)) == Restart(2, 1.0)


def test_a_run_that_its_guard_has_ended_is_not_restarted() -> None:
    decision = RestartPolicy(max_restarts=None).decide(Setback(0, "DivergedError", "", 12, 3, raised=True))
    assert isinstance(decision, StopRestarting)
    assert "ended it on purpose" in decision.reason
