"""Records that ranks leave for the launching process."""

from pathlib import Path

from trainwright.core.failures.records import StepRecord, read_steps


def test_step_records(tmp_path: Path) -> None:
    assert read_steps(tmp_path) == {}
    first, second = StepRecord(tmp_path, 0), StepRecord(tmp_path, 1)
    assert read_steps(tmp_path) == {}, "no rank has begun to train"
    second.write(0)
    assert read_steps(tmp_path) == {1: 0}
    first.write(7)
    second.write(8)
    (tmp_path / "step.3").touch()  # is being made
    assert read_steps(tmp_path) == {0: 7, 1: 8}
