"""Where the ranks print."""

import contextlib
import os
import sys
from collections.abc import Iterator


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
