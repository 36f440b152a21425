"""A notice that the run is to end, where workers step by themselves: it travels with pushes and their answers.

A worker that was told tells the first server with its next push. The server names the step after which all end: the
first that none of them has gone beyond by the time it hears. Every answer from then on says how many steps of the
worker are left until then, so none passes it, and nobody waits for anybody to find out. Under ``ssp`` and ``async``
those that are behind make the steps that they lack: all are saved at the same step.
"""

from __future__ import annotations

import time

from trainwright.core.run.peers import EndNotice, ReceivedNotice
from trainwright.strategies.parameter_server.server.clocks import Clocks


class Ending:
    """When workers are to end, as a server knows it. Not safe between threads."""

    def __init__(self) -> None:
        self._told: tuple[int, float] | None = None
        self._last = 0

    def tell(self, notice: EndNotice, clocks: Clocks) -> None:
        """A worker that is about to make a step brings a notice; the first one counts."""
        if self._told is None:
            self._told = notice.number, time.monotonic() - notice.age
            # Those that train may be in the midst of a step; those that wait for all others are not.
            of_training = [clocks.clock(worker) + 1 for worker in clocks.training]
            self._last = max([*of_training, *(clocks.clock(worker) for worker in clocks.workers)])

    def of(self, clock: int) -> ReceivedNotice | None:
        """What a worker at this clock is to hear; ``None``: nothing."""
        if self._told is None:
            return None
        number, since = self._told
        return ReceivedNotice(number, time.monotonic() - since, max(0, self._last - clock))
