"""Total time by kind, measured by the host's clock."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any


class Spans:
    """Total time by kind, measured by the host's clock."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    def mark(self) -> Any:
        """Return a mark of the current time."""
        return time.perf_counter()

    def add(self, kind: str, begin: Any, end: Any) -> None:
        """Count the time between two marks as ``kind``."""
        self._seconds[kind] += end - begin

    def take(self) -> dict[str, float]:
        """Return seconds by kind since the last call; spans the device has not finished are left for the next."""
        taken, self._seconds = self._seconds, defaultdict(float)
        return taken

    def settle(self) -> None:
        """Wait until the device has finished all added spans."""
