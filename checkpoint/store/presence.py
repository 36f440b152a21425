"""Existence checks that raise on disk errors, unlike ``os.path``: an unreadable path may be a good checkpoint."""

from __future__ import annotations

import errno
import os
import stat

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def is_there(path: str | os.PathLike[str]) -> bool:
    """Return whether the path exists, even as a broken link.

    Raises:
        OSError: if the disk fails.
    """
    return _mode(path, follow=False) != 0


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether the path is a folder, or a link to one.

    Raises:
        OSError: if the disk fails.
    """
    return stat.S_ISDIR(_mode(path))


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Return whether the path is a regular file, or a link to one.

    Raises:
        OSError: if the disk fails.
    """
    return stat.S_ISREG(_mode(path))


def is_link(path: str | os.PathLike[str]) -> bool:
    """Return whether the path is a symbolic link.

    Raises:
        OSError: if the disk fails.
    """
    return stat.S_ISLNK(_mode(path, follow=False))


def _mode(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    try:
        return os.stat(path, follow_symlinks=follow).st_mode
    except ValueError:  # a null byte in the name
        return 0
    except OSError as error:
        if error.errno in _ABSENT:
            return 0
        raise
