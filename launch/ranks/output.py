"""Where the ranks print."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def ranks_speak_to_stderr() -> Iterator[None]:
    """Processes started within have standard error for their standard output, so that a report stands there alone."""
    sys.stdout.flush()
    held = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(held, 1)
        os.close(held)


class Output:
    """What this process prints, compiled code included: to where it printed at first, or to the end of a file."""

    def __init__(self) -> None:
        self._first = os.dup(1), os.dup(2)

    def to(self, path: Path | None) -> None:
        """Print into a file from now on; `None`: to where it was at first."""
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
