"""Coordinated end of a run whose workers step independently, through pushes and replies.

A worker with a notice reports it to the first server with its next push. The server chooses the last step: the first
that no worker has passed. Every later reply contains the remaining steps of the worker, so none passes it and no worker
waits. Under ``ssp`` and ``async`` slower workers catch up: all save at the same step.
"""

from __future__ import annotations

import time

from trainwright.core.run.peers import EndNotice, ReceivedNotice
from trainwright.strategies.parameter_server.server.clocks import Clocks


class EndNoticeBoard:
    """End of the run, as known to a server. Not thread-safe."""

    def __init__(self) -> None:
        self._notice: tuple[int, float] | None = None
        self._last = 0

    def tell(self, notice: EndNotice, clocks: Clocks) -> None:
        """Record the notice of a worker that is about to step; the first one counts."""
        if self._notice is None:
            self._notice = notice.number, time.monotonic() - notice.age
            # Training workers may be within a step; those at a meeting are not.
            self._last = max(clocks.clock(worker) + (worker in clocks.training) for worker in clocks.workers)

    def of(self, clock: int) -> ReceivedNotice | None:
        """Return the notice for a worker at this clock, if any."""
        if self._notice is None:
            return None
        number, since = self._notice
        return ReceivedNotice(number, time.monotonic() - since, max(0, self._last - clock))
