"""What the ranks of an engine leave in the run directory for the process that waits for them."""

from __future__ import annotations

import shutil
from pathlib import Path

_FOLDER = Path("logs") / "ends"
_BEGUN = "begun"


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
