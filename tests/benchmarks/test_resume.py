from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import resume, resume_anywhere
from tests.warm import WarmPopen
from trainwright.command.cli import main


@pytest.mark.thorough
def test_a_resumed_run_is_measured(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", WarmPopen)
    monkeypatch.setattr(resume, "_PROCESSES", 1)  # Lightning starts further ones without a warm server
    resume.prepare(tmp_path)
    assert (tmp_path / "lightning.ckpt").is_file()
    make = resume.sides(tmp_path)[resume.OTHER]
    assert resume.seconds_to_first_step(make) > 0


def test_losses_after_the_change_are_compared():
    whole = dict.fromkeys(range(20), 2.0)
    moved = dict.fromkeys(range(10, 20), 2.0)
    assert resume_anywhere.compare(whole, moved) == 0
    assert resume_anywhere.compare(whole, {**moved, 15: 2.002}) == pytest.approx(1e-3)
    with pytest.raises(RuntimeError, match="has the steps"):
        resume_anywhere.compare(whole, dict.fromkeys(range(11, 20), 2.0))


def test_every_layout_is_written_once_and_read_once():
    assert sorted(first for first, _ in resume_anywhere.PAIRS) == sorted(resume_anywhere.PLACES)
    assert sorted(second for _, second in resume_anywhere.PAIRS) == sorted(resume_anywhere.PLACES)
    assert {place.ranks for place in resume_anywhere.PLACES.values()} == {1, 2, 3, 4, 8}


def in_this_process(command: list[str], environment: dict[str, str], folder: Path) -> None:
    """Run a command in this process, which saves its imports."""
    assert command[1:3] == ["-m", "trainwright"]
    assert main(command[3:]) == 0


@pytest.mark.thorough
def test_one_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_anywhere, "STOP", 2)
    monkeypatch.setattr(resume_anywhere, "END", 4)
    monkeypatch.setattr(resume_anywhere, "run_command", in_this_process)
    (row,) = resume_anywhere.measure([("single", "ddp-2")], tmp_path)
    assert row["worst"] <= resume_anywhere.TOLERANCE
