"""Temporary folder of a launching process, removed at its exit.

Folders of killed processes (kill -9) are removed at the next start: the folder of a live process is locked, and the
kernel releases the lock however the process ends.
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
# Characters. The folder holds sockets of multiprocessing, whose paths may have at most 107.
_LONGEST_PARENT = 45


@cache
def scratch() -> Path:
    """Return the folder of this process, created on first use and removed at exit."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > _LONGEST_PARENT:
        parent = Path("/tmp")  # noqa: S108 - mkdtemp creates a private folder
    remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
    _lock(folder / _LOCK)
    # After multiprocessing removes its own folder in it (priority -100); not inherited by forks.
    util.Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-200)
    return folder


def remove_abandoned(parent: Path) -> None:
    """Remove the folders under `parent` whose processes have ended."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        if _is_mine(folder) and not _is_locked(folder / _LOCK):
            shutil.rmtree(folder, ignore_errors=True)


def _lock(path: Path) -> None:
    """Create a file that stays locked while this process lives; it appears under its name already locked."""
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
        return True  # no lock file: under construction, or not ours
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def default_variables(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the context, except those already set."""
    mine = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)
