"""Imports of a process with a short start-up time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Disable Python's cyclic garbage collector during imports, which create no garbage.

    It saves 0.7 of 4.9 seconds of CPU for torch, Lightning and this package.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
