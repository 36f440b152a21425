import pytest

from benchmarks import startup
from benchmarks.commands import PATIENCE


@pytest.mark.thorough
def test_the_moment_of_the_first_step_comes_from_the_rank():
    assert 0 < startup.seconds_to_first_step("trainwright fit", 1) < PATIENCE


def test_a_command_that_fails_says_why(monkeypatch):
    monkeypatch.setitem(startup.SIDES, "broken", lambda processes, folder: ["sh", "-c", "echo no; exit 3"])
    with pytest.raises(RuntimeError, match=r"ended with 3:\nno"):
        startup.seconds_to_first_step("broken", 1)


def test_a_command_without_a_step_is_noticed(monkeypatch):
    monkeypatch.setitem(startup.SIDES, "idle", lambda processes, folder: ["echo", "nothing to do"])
    with pytest.raises(RuntimeError, match="0 of 2 rank"):
        startup.seconds_to_first_step("idle", 2)
