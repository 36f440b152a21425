"""State of one watched process."""

from collections.abc import Sequence

from trainwright.core.processes.process import RUNNING, SLEEPING, STOPPED, is_alive, state_of, stop_id
from trainwright.launch.watchdog.boxes import SETUP, Progress

# A process stopped for this long while others run was stopped alone: suspending or continuing a job signals one rank
# after the other, within much less time.
_STOPPED_SECONDS = 1.0
# Upper bound of the time counted between two checks, so that at least three checks have seen the stop, and a monitor
# that was suspended briefly, and continued before its ranks, checks once more.
_LONGEST_STOPPED_LOOK = 0.5
_NOTHING = Progress(process=0, rank=-1, running=False, phase=SETUP, step=0, micro_batches=0, changes=0, longest={})


class Watched:
    """A process that is watched.

    Args:
        number: by which the monitor knows it.
        box: number of its box.

    Attributes:
        process: its id; 0 = not started yet.
        progress: its box.
        state: in the kernel, of a process within a run.
        stalled: seconds since the box changed.
        stop: identifies its present stop; ``None`` = none that counts.
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
        """Whether a signal has stopped it, but not the others, for longer than a job takes to be suspended."""
        return self._stopped >= _STOPPED_SECONDS

    def look(self, progress: Progress) -> bool:
        """Update from the box; return whether it has changed."""
        if self.process and progress.process != self.process:
            progress = _NOTHING  # the box of the previous process
        changed = (progress.process, progress.changes) != (self.progress.process, self.progress.changes)
        if changed:
            self.stalled, self.stop = 0.0, None
        self.progress = progress
        self.state = state_of(progress.process) if progress.running else ""
        return changed

    def count_stop(self, passed: float | None) -> None:
        """Add to the time it has been stopped.

        Args:
            passed: seconds since the last check; ``None`` = restart the timing.
        """
        stop = stop_id(self.progress.process) if passed is not None and self.state == STOPPED else None
        same = stop is not None and stop == self.stop
        self._stopped = self._stopped + min(passed or 0.0, _LONGEST_STOPPED_LOOK) if same else 0.0
        self.stop = stop


def all_stopped(running: Sequence[Watched]) -> bool:
    """Return whether a signal has stopped all of several processes, like Ctrl-Z or a scheduler that suspends a job."""
    return len(running) > 1 and all(one.state == STOPPED for one in running)


def any_runs(running: Sequence[Watched]) -> bool:
    """Return whether any process is certainly not stopped; one that waits in the kernel may stop when it returns."""
    return any(one.state in (RUNNING, SLEEPING) for one in running)
