"""Which ranks are on this machine, and where their logs begin: told by the ranks, to who shows what they print."""

from __future__ import annotations

import os
from pathlib import Path

from trainwright.core.failures.failure import log_file
from trainwright.core.failures.records import write_whole

HERE = "TRAINWRIGHT_HERE"
"""Variable with a folder of this machine; without it nobody wants to know."""


def tell_here(run_dir: Path, rank: int) -> None:
    """Say that a rank begins here, and how long its log is before it does."""
    folder = os.environ.get(HERE)
    if folder is None:
        return
    path = Path(folder) / str(rank)
    if not path.exists():  # of ranks that are started again everything is shown once
        log = log_file(run_dir, rank)
        write_whole(path, str(log.stat().st_size if log.is_file() else 0))


def ranks_here(folder: Path) -> dict[int, int]:
    """The length that the log of each rank of this machine had when it began, by rank."""
    return {int(path.name): int(path.read_text()) for path in sorted(folder.glob("[0-9]*"))}
