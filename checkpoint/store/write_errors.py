"""Errors of the operating system while writing, in words that say what to do."""

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
    """What to raise from an error met while writing ``path``.

    Args:
        error: as raised by the operating system or a store.
        path: of the file or folder.
        needed: bytes that the file has at least; ``None``: not known.
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
        return CheckpointError(f"{path}: not allowed to write there ({error}); change the rights or {ELSEWHERE}.")
    if isinstance(error, FileExistsError | NotADirectoryError):
        return CheckpointError(f"{path}: there is a file where a folder is needed ({error}); remove it or {ELSEWHERE}.")
    return CheckpointError(f"{path}: could not be written ({type(error).__name__}: {error}); {ELSEWHERE} or try again.")


def delete_error(error: Exception, path: str) -> CheckpointError:
    """What to raise from an error met while deleting ``path``."""
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"{path}: could not be deleted ({type(error).__name__}: {error}); delete it by hand.")


def refuse_unwritable(folder: str) -> None:
    """Find before training that nothing can be saved, as far as the rights of a folder of this machine tell.

    Raises:
        CheckpointError: if ``folder``, or the nearest one above it that exists, may not be written.
    """
    if is_remote(folder):
        return
    nearest = _nearest(folder)
    if os.path.isdir(nearest) and not os.access(nearest, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{folder}: not allowed to write in {nearest}, so no checkpoint could be saved; change the rights or "
            f"{ELSEWHERE}."
        )


def free_bytes(path: str) -> int | None:
    """Bytes that may still be written where ``path`` is or would be; ``None`` for a store that cannot tell."""
    if is_remote(path):
        return None
    try:
        stats = os.statvfs(_nearest(path))
    except OSError:
        return None
    return stats.f_bavail * stats.f_frsize


def _nearest(path: str) -> str:
    """The nearest folder above ``path`` that exists."""
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
