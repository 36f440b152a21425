"""Records that an engine's ranks leave for the launching process, in the run directory or on their machine."""

import os
import shutil
from pathlib import Path

from trainwright.core.failures.failure import log_file
from trainwright.core.failures.records import write_whole

_FOLDER = Path("logs") / "ends"
_BEGUN = "begun"
LOCAL_RANKS = "TRAINWRIGHT_LOCAL_RANKS"
"""Variable with a folder of this machine for the sizes of its ranks' logs; unset = not recorded."""


def ends_folder(run_dir: Path) -> Path:
    """Return the folder of the ranks' failures and rank 0's final metrics."""
    return run_dir / _FOLDER


def empty_ends(run_dir: Path) -> Path:
    """Return the same folder, without the records of an earlier run in this directory."""
    folder = ends_folder(run_dir)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def forget_rank(run_dir: Path, rank: int, world_size: int) -> Path:
    """Delete the record of a rank that is being (re)started; rank 0 also deletes those of ranks that no longer exist.

    Returns:
        The folder.
    """
    folder = ends_folder(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    gone = [int(path.stem) for path in folder.glob("*.json") if rank == 0 and int(path.stem) >= world_size]
    for each in (rank, *gone):
        (folder / f"{each}.json").unlink(missing_ok=True)
    return folder


def is_restart(run_dir: Path) -> bool:
    """Return whether the ranks of this run were started before, as after a failure or a requeued job.

    Called once per attempt, by rank 0 or its launcher, because it marks the run as started.
    """
    mark = ends_folder(run_dir) / _BEGUN
    was_there = mark.exists()
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    return was_there


def record_local_rank(run_dir: Path, rank: int) -> None:
    """Record that a rank starts on this machine, and the size of its log before."""
    folder = os.environ.get(LOCAL_RANKS)
    if folder is None:
        return
    path = Path(folder) / str(rank)
    if not path.exists():  # the output of restarted ranks is shown once, from their first start
        log = log_file(run_dir, rank)
        write_whole(path, str(log.stat().st_size if log.is_file() else 0))


def local_ranks(folder: Path) -> dict[int, int]:
    """Return the size of each local rank's log at its start, by rank."""
    return {int(path.name): int(path.read_text()) for path in sorted(folder.glob("[0-9]*"))}
