"""One process of a machine, as its monitor saw it last."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.core.processes.process import RUNNING, SLEEPING, STOPPED, is_alive, state_of, stop_id
from trainwright.launch.watchdog.boxes import SETUP, Progress

# Stopped for so long while others run, a process was not stopped with them: who suspends a job, or continues it, sends
# a signal to one rank after the other, and is through with a machine in much less.
_STOPPED_SECONDS = 1.0
# Of the time between two looks this much counts towards it. So three looks at least have seen the stop, and a monitor
# that was suspended for a moment, and is continued before its ranks, looks once more.
_LONGEST_STOPPED_LOOK = 0.5
_NOTHING = Progress(process=0, rank=-1, running=False, phase=SETUP, step=0, micro_batches=0, changes=0, longest={})


class Watched:
    """A process that is watched.

    Args:
        number: by which the monitor knows it.
        box: number of its box.

    Attributes:
        process: its id; 0 = it is not known to be started yet.
        progress: its box.
        state: of a process within a run, of the kernel.
        stalled: seconds since anything changed in the box.
        stop: which of its stops it is in; ``None`` = in none that counts.
    """

    def __init__(self, number: int, box: int) -> None:
        self.number = number
        self.box = box
        self.process = 0
        self.progress = _NOTHING
        self.state = ""
        self.stalled = 0.0
        self.stop: int | None = None
        self._stopped = 0.0

    @property
    def runs(self) -> bool:
        """Whether it is alive and within a run."""
        return self.progress.running and is_alive(self.progress.process, self.state)

    @property
    def stopped_alone(self) -> bool:
        """Whether a signal has stopped it, and has not stopped the others, for too long to be on the way to them."""
        return self._stopped >= _STOPPED_SECONDS

    def look(self, progress: Progress) -> bool:
        """See what the box says now; whether it has changed."""
        if self.process and progress.process != self.process:
            progress = _NOTHING  # the box of the process before
        changed = (progress.process, progress.changes) != (self.progress.process, self.progress.changes)
        if changed:
            self.stalled, self.stop = 0.0, None
        self.progress = progress
        self.state = state_of(progress.process) if progress.running else ""
        return changed

    def count_stop(self, passed: float | None) -> None:
        """Count how long it has been stopped.

        Args:
            passed: seconds since the look before; ``None`` = nothing counts that was seen up to now.
        """
        stop = stop_id(self.progress.process) if passed is not None and self.state == STOPPED else None
        same = stop is not None and stop == self.stop
        self._stopped = self._stopped + min(passed or 0.0, _LONGEST_STOPPED_LOOK) if same else 0.0
        self.stop = stop


def are_suspended(running: Sequence[Watched]) -> bool:
    """Whether a signal has stopped all of several processes, as a scheduler does that suspends a job, or Ctrl-Z."""
    return len(running) > 1 and all(one.state == STOPPED for one in running)


def any_gets_on(running: Sequence[Watched]) -> bool:
    """Whether one of the processes is certainly not stopped: one that waits in the kernel will stop when it is back."""
    return any(one.state in (RUNNING, SLEEPING) for one in running)
