"""Whether something is on the disk. ``os.path`` takes every error for absence; these raise that of a failing disk:
what cannot be looked at may be a good checkpoint."""

from __future__ import annotations

import errno
import os
import stat

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether there is anything, a broken link included.

    Raises:
        OSError: if the disk does not say.
    """
    return _mode(path, follow=False) != 0


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether there is a folder, or a link to one.

    Raises:
        OSError: if the disk does not say.
    """
    return stat.S_ISDIR(_mode(path))


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Whether there is a regular file, or a link to one.

    Raises:
        OSError: if the disk does not say.
    """
    return stat.S_ISREG(_mode(path))


def is_link(path: str | os.PathLike[str]) -> bool:
    """Whether there is a symbolic link.

    Raises:
        OSError: if the disk does not say.
    """
    return stat.S_ISLNK(_mode(path, follow=False))


def _mode(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    try:
        return os.stat(path, follow_symlinks=follow).st_mode
    except ValueError:  # no name of a file: a null byte in it
        return 0
    except OSError as error:
        if error.errno in _ABSENT:
            return 0
        raise
