"""Commands that benchmarks start."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from benchmarks.commands import run_command, started


def test_a_command_ends_with_what_has_started_it(tmp_path: Path) -> None:
    found: list[subprocess.Popen[str]] = []
    with pytest.raises(KeyboardInterrupt):
        _interrupted(tmp_path, found)
    assert [process.returncode for process in found] == [-signal.SIGTERM]


def _interrupted(folder: Path, found: list[subprocess.Popen[str]]) -> None:
    with started(["sleep", "60"], os.environ, folder, subprocess.DEVNULL) as process:
        found.append(process)
        raise KeyboardInterrupt


def test_what_a_command_prints_is_given_or_raised(tmp_path: Path) -> None:
    assert run_command(["echo", "hello"], os.environ, tmp_path) == "hello\n"
    with pytest.raises(RuntimeError, match="ended with 3:\nbye"):
        run_command(["sh", "-c", "echo bye; exit 3"], os.environ, tmp_path)
