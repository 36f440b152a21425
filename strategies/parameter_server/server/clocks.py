"""Worker clocks, the bound between them, and their common end."""

from __future__ import annotations

import time
from typing import Literal

from trainwright.core.run.peers import EndNotice, ReceivedNotice

Consistency = Literal["sync", "ssp", "async"]


class Clocks:
    """Step counts of workers and the decision who may start the next step.

    A worker at clock ``c`` has made ``c`` steps. It may proceed if the slowest worker has made at least ``c - bound``:
    bound 0 is bulk synchronous, ``s`` is stale synchronous parallel (Ho et al., "More effective distributed ML via a
    stale synchronous parallel parameter server", NIPS 2013, section 2), ``None`` is asynchronous. Workers at a meeting
    and lost ones block no one. Not thread-safe.

    Args:
        bound: steps that a worker may be ahead of the slowest; ``None``: any number.
    """

    def __init__(self, bound: int | None) -> None:
        self.bound = bound
        self._clocks: dict[int, int] = {}
        self._waiting: set[int] = set()

    @property
    def workers(self) -> tuple[int, ...]:
        """Live workers, in order."""
        return tuple(sorted(self._clocks))

    @property
    def training(self) -> tuple[int, ...]:
        """Live workers that are not at a meeting, in order."""
        return tuple(worker for worker in self.workers if worker not in self._waiting)

    @property
    def slowest(self) -> int:
        """Least clock of training workers; of all live ones if none trains; 0 if none lives."""
        return min((self._clocks[worker] for worker in self.training or self.workers), default=0)

    def clock(self, worker: int) -> int:
        """Return the steps made by a live worker."""
        return self._clocks[worker]

    def join(self, worker: int) -> int:
        """Add or re-add a worker at the slowest clock; returns its clock."""
        self.leave(worker)
        self._clocks[worker] = self.slowest
        return self._clocks[worker]

    def leave(self, worker: int) -> None:
        """Remove a worker."""
        self._clocks.pop(worker, None)
        self._waiting.discard(worker)

    def tick(self, worker: int) -> None:
        """Count a step of a worker."""
        self._clocks[worker] += 1

    def may_proceed(self, worker: int) -> bool:
        """Return whether a worker may start its next step."""
        return self.bound is None or self._clocks[worker] - self.slowest <= self.bound

    def wait(self, worker: int) -> None:
        """Mark a worker as waiting at a meeting."""
        self._waiting.add(worker)

    @property
    def all_waiting(self) -> bool:
        """True if all live workers wait at a meeting."""
        return bool(self._clocks) and not self.training

    def release(self) -> None:
        """End a meeting: set all clocks to the fastest."""
        self._clocks = dict.fromkeys(self._clocks, max(self._clocks.values(), default=0))
        self._waiting.clear()


class EndNoticeBoard:
    """End of a run whose workers step independently, as known to a server; through pushes and replies. Not thread-safe.

    A worker with a notice reports it to the first server with its next push. The server chooses the last step: the
    first that no worker has passed. Every later reply contains the remaining steps of the worker, so none passes it and
    no worker waits. Under ``ssp`` and ``async`` slower workers catch up: all save at the same step.
    """

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
