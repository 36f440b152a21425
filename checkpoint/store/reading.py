"""Reading of checkpoint files with errors that name the file."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, BinaryIO

from trainwright.core.errors import CheckpointError

_BUFFER = 1 << 16


def open_named(path: str, opening: Callable[[], Any]) -> BinaryIO:
    """Open a file whose reads are complete even if the store returns short reads.

    Args:
        path: for messages.
        opening: opens a seekable binary file.

    Raises:
        CheckpointError: if it cannot be opened; its ``read``, ``readinto`` and ``seek`` raise it too.
    """
    with reading(path):
        return io.BufferedReader(_Named(path, opening()), _BUFFER)


class reading:  # noqa: N801
    """Context manager that converts errors of reading ``path`` into :class:`CheckpointError`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, CheckpointError):
            raise _read_error(self._path, error) from error


def _read_error(path: str, error: Exception) -> CheckpointError:
    """Return the error to raise for one met while reading ``path``."""
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"{path}: this file is missing.")
    if isinstance(error, PermissionError):
        return CheckpointError(f"{path}: not readable by this user; change its permissions (chmod -R u+rX).")
    return CheckpointError(f"{path}: could not be read ({type(error).__name__}: {error}).")


class _Named(io.RawIOBase):
    def __init__(self, path: str, inner: Any) -> None:
        self._path = path
        self._inner = inner

    @property
    def name(self) -> str:
        return self._path

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with reading(self._path):
            return int(self._inner.readinto(buffer) or 0)

    def seek(self, offset: int, whence: int = 0) -> int:
        with reading(self._path):
            return int(self._inner.seek(offset, whence))

    def tell(self) -> int:
        return int(self._inner.tell())

    def close(self) -> None:
        if not self.closed:
            self._inner.close()
        super().close()
