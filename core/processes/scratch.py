"""One folder for the temporary files of a launching process, gone when it ends.

What a killed process (kill -9) left is removed by the next start: the folder of a living process is locked, and the
kernel lets go of the lock whichever way the process ends.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from multiprocessing import util
from pathlib import Path

_PREFIX = "trainwright-"
_LOCK = "lock"
# Characters. Sockets of multiprocessing lie in this folder, and the path of a socket may have at most 107.
_LONGEST_PARENT = 45


@cache
def scratch() -> Path:
    """The folder of this process, made on first use and removed at its exit."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > _LONGEST_PARENT:
        parent = Path("/tmp")  # noqa: S108 - mkdtemp makes a folder that no other user can read or replace
    remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
    _lock(folder / _LOCK)
    # After multiprocessing's own folder in it (priority -100); a forked child does not inherit this.
    util.Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-200)
    return folder


def remove_abandoned(parent: Path) -> None:
    """Remove the folders under `parent` whose processes are gone."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        if _is_mine(folder) and not _is_locked(folder / _LOCK):
            shutil.rmtree(folder, ignore_errors=True)


def _lock(path: Path) -> None:
    """Make a file that is locked as long as this process lives: as long as it is not, nobody must find it."""
    unlocked = path.with_suffix(".new")
    # Kept open for the life of the process: closing it would free the lock.
    descriptor = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unlocked.rename(path)


def _is_mine(folder: Path) -> bool:
    try:
        return folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()
    except OSError:
        return False


def _is_locked(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:
        return True  # without a lock file it is just being made, or not ours
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def default_variables(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set variables within, except those that the user has set."""
    mine = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)
