from pathlib import Path

import pytest


def write_text(folder: Path) -> Path:
    file = folder / "text.txt"
    file.write_text("".join(f"{i}: the quick brown fox jumps over the lazy dog\n" for i in range(400)))
    return file


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)
