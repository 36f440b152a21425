"""What the ranks of an engine leave for the process that waits for them, in the run directory or on their machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainwright.core.failures.failure import log_file
from trainwright.core.failures.records import write_whole

_FOLDER = Path("logs") / "ends"
_BEGUN = "begun"
HERE = "TRAINWRIGHT_HERE"
"""Variable with a folder of this machine; without it nobody wants to know."""


def ends_folder(run_dir: Path) -> Path:
    """Where ranks write down how they failed, and rank 0 the metrics of the end."""
    return run_dir / _FOLDER


def empty_ends(run_dir: Path) -> Path:
    """The same folder, without what an earlier run in this directory has left."""
    folder = ends_folder(run_dir)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def forget_end(run_dir: Path, rank: int, world_size: int) -> Path:
    """Make room for the end of one rank that is started (again); rank 0 does so for ranks that there no longer are.

    Returns:
        The folder.
    """
    folder = ends_folder(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    gone = [int(path.stem) for path in folder.glob("*.json") if rank == 0 and int(path.stem) >= world_size]
    for each in (rank, *gone):
        (folder / f"{each}.json").unlink(missing_ok=True)
    return folder


def begins_again(run_dir: Path) -> bool:
    """Whether the ranks of this run were started before, as after a failure or when a job was requeued.

    Asked once for each attempt, by rank 0 or by who starts it; the next one hears that it begins again.
    """
    mark = ends_folder(run_dir) / _BEGUN
    was_there = mark.exists()
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    return was_there


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
