"""Fixtures of commands in a user's project that makes trouble."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.commands import write_faulty_project


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """Write the project; return its configuration directory."""
    return write_faulty_project(tmp_path)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, with a path as short as that of an ordinary one."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)
