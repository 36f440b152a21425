"""Publishing by renaming, with roll-back."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from trainwright.checkpoint.store.presence import is_folder, is_there
from trainwright.core.errors import CheckpointError


def put_in_place(new: str, target: str, aside: str) -> None:
    """Rename ``new`` to ``target`` and sync the folder.

    The previous target is then at ``new`` or at ``aside``, for the caller to delete. All three must be on one file
    system.

    Raises:
        OSError: if it failed; ``target`` is unchanged, or if even that could not be restored, at ``aside``.
        CheckpointError: if ``target`` is the new one, but the folder could not be synced to disk.
    """
    back = _rename(new, target, aside)
    try:
        sync_folder(os.path.dirname(target))
    except OSError as error:
        undone = False
        with suppress(OSError):
            undone = back() is not False
        if not undone:
            raise CheckpointError(
                f"{target} is written, but a loss of power may undo that: its folder could not be synced to disk "
                f"({error.strerror}). Check the disk, and save again."
            ) from error
        raise


def sync_folder(path: str) -> None:
    """Sync the names in a folder to disk, so that renaming survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not supported by the file system
            raise
    finally:
        os.close(descriptor)


def _rename(new: str, target: str, aside: str) -> Callable[[], object]:
    """Rename, atomically where the system can; return a function that undoes it, and returns False if it cannot."""
    if not is_there(target):
        os.rename(new, target)
        return partial(os.rename, target, new)
    if _swap(new, target):
        return partial(_swap, new, target)
    if not is_folder(new) and not is_folder(target):
        os.rename(new, target)  # atomic too, but cannot be undone
        return lambda: False
    # If this process is killed in between, `clean_up` restores the old one from `aside`.
    os.rename(target, aside)
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(aside, target)
        raise
    return partial(_rename_back, new, target, aside)


def _rename_back(new: str, target: str, aside: str) -> None:
    os.rename(target, new)
    os.rename(aside, target)


def _swap(one: str, other: str) -> bool:
    """Exchange two names atomically; return False where that is not supported."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2 is not None and renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
