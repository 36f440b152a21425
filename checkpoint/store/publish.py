"""Give what has been written its name, in the place of what has it now, and be able to take that back."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import partial

from trainwright.checkpoint.store.presence import is_folder, is_there
from trainwright.core.errors import CheckpointError


def put_in_place(new: str, target: str, aside: str) -> None:
    """Rename ``new`` to ``target``, and bring the names to the disk.

    What ``target`` named before is at ``new`` then, or at ``aside``; for the caller to delete. All three are in folders
    of one file system.

    Raises:
        OSError: if it failed; ``target`` names what it named before. Where not even that can be brought about, that is
            at ``aside``.
        CheckpointError: if ``target`` names the new, and only that this is on the disk is not certain.
    """
    back = _rename(new, target, aside)
    try:
        sync_folder(os.path.dirname(target))
    except OSError as error:
        try:
            back()
        except OSError:
            raise CheckpointError(
                f"{target} is written and has its name, but a loss of power may undo that: the names in its folder "
                f"could not be brought to the disk ({error.strerror}). Check the disk, and save again."
            ) from error
        raise


def sync_folder(path: str) -> None:
    """Bring the names in a folder to the disk: a renaming is lost with the power otherwise."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that have no such thing
            raise
    finally:
        os.close(descriptor)


def _rename(new: str, target: str, aside: str) -> Callable[[], object]:
    """Rename in one step where the system can; returns how to take it back."""
    if not is_there(target):
        os.rename(new, target)
        return partial(os.rename, target, new)
    if _swap(new, target):
        return partial(_swap_back, new, target)
    if not is_folder(new) and not is_folder(target):
        os.rename(new, target)  # in one step, too; but nothing is left of the old one
        return _impossible
    # Between two renamings the old one waits under a name from which `clean_up` brings it back if this process ends.
    os.rename(target, aside)
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(aside, target)
        raise
    return partial(_rename_back, new, target, aside)


def _impossible() -> None:
    raise OSError


def _rename_back(new: str, target: str, aside: str) -> None:
    os.rename(target, new)
    os.rename(aside, target)


def _swap(one: str, other: str) -> bool:
    """Exchange two names in one step; false where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2 is not None and renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _swap_back(new: str, target: str) -> None:
    if not _swap(new, target):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
