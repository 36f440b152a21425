"""What is told of restarts."""

from pathlib import Path

import pytest

from trainwright.launch.recovery.restart_log import RestartLog


def test_details_are_in_the_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RestartLog(tmp_path)
    log.tell("rank 1 failed", "Traceback: boom")
    log.tell("restart 1")
    assert capsys.readouterr().err == "trainwright: rank 1 failed\ntrainwright: restart 1\n"
    written = log.path.read_text()
    assert [word in written for word in ("rank 1 failed\n    Traceback: boom\n", "restart 1\n")] == [True, True]


def test_a_run_goes_on_whose_log_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("no folder")
    RestartLog(tmp_path).tell("rank 1 failed", "Traceback: boom")
    said = capsys.readouterr().err
    assert said.startswith("trainwright: rank 1 failed\n")
    assert "restarts.log cannot be written" in said
    assert "Traceback: boom" in said
