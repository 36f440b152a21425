"""Redirection of the ranks' output."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def ranks_to_stderr() -> Iterator[None]:
    """Send the standard output of processes started within to standard error, so that a report stands alone."""
    sys.stdout.flush()
    held = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(held, 1)
        os.close(held)


class Output:
    """Output of this process, that of compiled code included: the original streams, or the end of a file."""

    def __init__(self) -> None:
        self._first = os.dup(1), os.dup(2)

    def to(self, path: Path | None) -> None:
        """Redirect the output to a file; None = back to the original streams."""
        sys.stdout.flush()
        sys.stderr.flush()
        if path is None:
            for own, first in zip((1, 2), self._first, strict=True):
                os.dup2(first, own)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
