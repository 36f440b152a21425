"""Explanations of operating system errors while writing."""

from __future__ import annotations

import errno
import os

from trainwright.checkpoint.store.paths import is_remote, local_path
from trainwright.core.errors import CheckpointError
from trainwright.core.text.sizes import size_text

ELSEWHERE = "choose another folder (checkpoint.*.dirpath=...)"

_FULL = {
    errno.ENOSPC: "no space left",
    errno.EDQUOT: "the quota is used up, no space left",
    errno.EFBIG: "the limit on the size of a file (ulimit -f) is reached, no space left",
}


def write_error(error: Exception, path: str, needed: int | None = None) -> CheckpointError:
    """Return the error to raise for one met while writing ``path``.

    Args:
        error: of the operating system or a store.
        path: of the file or folder.
        needed: least size of the file in bytes; ``None``: unknown.
    """
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError) and error.errno in _FULL:
        size = "" if needed is None else f" needed {size_text(needed)},"
        free = free_bytes(path)
        left = "" if free is None else f" free {size_text(free)};"
        return CheckpointError(
            f"{path}: {_FULL[error.errno]} on {_mount(path)}:{size}{left} free space or {ELSEWHERE}. Nothing was "
            "published; checkpoints that were complete before are untouched."
        )
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno == errno.EROFS):
        return CheckpointError(f"{path}: not allowed to write there ({error}); change the permissions or {ELSEWHERE}.")
    if isinstance(error, FileExistsError | NotADirectoryError):
        return CheckpointError(f"{path}: there is a file where a folder is needed ({error}); remove it or {ELSEWHERE}.")
    return CheckpointError(f"{path}: could not be written ({type(error).__name__}: {error}); {ELSEWHERE} or try again.")


def delete_error(error: Exception, path: str) -> CheckpointError:
    """Return the error to raise for one met while deleting ``path``."""
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"{path}: could not be deleted ({type(error).__name__}: {error}); delete it by hand.")


def refuse_unwritable(folder: str) -> None:
    """Raise before training if the permissions of a local folder prevent saving.

    Raises:
        CheckpointError: if ``folder``, or its nearest existing parent, is not writable.
    """
    if is_remote(folder):
        return
    nearest = _nearest(folder)
    if os.path.isdir(nearest) and not os.access(nearest, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{folder}: not allowed to write in {nearest}, so no checkpoint could be saved; change the permissions or "
            f"{ELSEWHERE}."
        )


def refuse_full(path: str, needed: int) -> None:
    """Raise :class:`CheckpointError` if ``needed`` bytes do not fit on the disk of ``path``."""
    free = free_bytes(path)
    if free is not None and free < needed:
        raise CheckpointError(
            f"{path}: {size_text(needed)} do not fit into {size_text(free)} of free space. Nothing was written; free "
            f"space, give another path, or {ELSEWHERE}."
        )


def free_bytes(path: str) -> int | None:
    """Return the free space on the disk of ``path``; ``None`` if unknown, as in stores."""
    if is_remote(path):
        return None
    try:
        stats = os.statvfs(_nearest(path))
    except OSError:
        return None
    return stats.f_bavail * stats.f_frsize


def _nearest(path: str) -> str:
    """Return the nearest existing folder at or above ``path``."""
    path = local_path(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def _mount(path: str) -> str:
    if is_remote(path):
        return path.partition("://")[0] + "://"
    path = os.path.realpath(_nearest(path))
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path
