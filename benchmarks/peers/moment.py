"""The moment of the first optimizer step, in a file that the benchmark reads."""

from __future__ import annotations

import os
import time
from pathlib import Path

MOMENT_FOLDER = "TRAINWRIGHT_BENCHMARK_MOMENTS"
"""Environment variable: the folder in which every rank writes."""


def write_moment() -> None:
    """Write the seconds of the machine's monotonic clock, which all processes share."""
    now = time.monotonic()
    Path(os.environ[MOMENT_FOLDER], str(os.getpid())).write_text(repr(now))


def read_moments(folder: Path) -> list[float]:
    """Return the moments written by all ranks."""
    return [float(file.read_text()) for file in folder.iterdir()]
