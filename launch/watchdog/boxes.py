"""Progress boxes: the state of each rank of a machine in memory shared with the monitor, and the limits of its phases.

A rank writes and a monitor reads without waiting for each other; writing costs about a microsecond. All numbers are
aligned doubles, so that none is read half-written.

The memory has no name in the file system (``memfd``), so a killed process leaves nothing; processes of the same user
open it as ``/proc/<process>/fd/<number>``. Without memfd (not Linux) it is a file in the given folder.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainwright.core.run import phases

# Phases beyond those of trainwright.core.run.phases. The first batch of an epoch starts worker processes.
SETUP, FIRST_DATA = "setup", "first data"
OUTSIDE_OF_STEPS = EVALUATION, EVALUATION_END, ENDING, OTHER = "evaluation", "end of evaluation", "ending", "other"
PHASES = (SETUP, FIRST_DATA, *phases.PHASES, *OUTSIDE_OF_STEPS)
_INDEX = {name: index for index, name in enumerate(PHASES)}
# Layout of a box in doubles: twelve for the state, then the longest time of each phase.
_PROCESS, _STATE, _RANK, _PHASE, _STEP, _MICRO_BATCHES, _CHANGES = range(7)
_LONGEST = 12
_DOUBLES = 32
_BOX_BYTES = 8 * _DOUBLES
_EMPTY, _RUNNING, _ENDED = 0.0, 1.0, 2.0
# Optimizer steps that are not timed: compilation, first allocations, cold caches.
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Progress:
    """State of a rank when its box was read.

    Attributes:
        process: process id; 0 = the box is free.
        rank: global rank.
        running: whether the rank is within a run, from setup to teardown.
        phase: a name of :data:`PHASES`.
        step: optimizer steps of the run, those before a resume included.
        micro_batches: micro-batches started by this process.
        changes: phases started by this process.
        longest: phase -> longest duration so far in seconds; unseen phases are absent.
    """

    process: int
    rank: int
    running: bool
    phase: str
    step: int
    micro_batches: int
    changes: int
    longest: dict[str, float]


class Boxes:
    """The boxes of the ranks of a machine, created by the monitoring process.

    Args:
        count: number of boxes.
        folder: for the file, where there is no memfd.

    Attributes:
        address: path by which the ranks open them, valid until this object is closed.
    """

    def __init__(self, count: int, folder: Path) -> None:
        size = count * _BOX_BYTES
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("trainwright-boxes")
            self.address = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        else:
            self.address = str(folder / "boxes")
            self._descriptor = os.open(self.address, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self._descriptor, size)
        self._map = mmap.mmap(self._descriptor, size)
        self._all = memoryview(self._map).cast("d")

    def read(self, number: int) -> Progress:
        """Return the state of the rank of a box."""
        values = self._all[number * _DOUBLES : (number + 1) * _DOUBLES].tolist()
        longest = values[_LONGEST : _LONGEST + len(PHASES)]
        return Progress(
            process=int(values[_PROCESS]),
            rank=int(values[_RANK]),
            running=values[_STATE] == _RUNNING,
            phase=PHASES[int(values[_PHASE])],
            step=int(values[_STEP]),
            micro_batches=int(values[_MICRO_BATCHES]),
            changes=int(values[_CHANGES]),
            longest={name: seconds for name, seconds in zip(PHASES, longest, strict=True) if seconds > 0},
        )

    def close(self) -> None:
        """Release the memory; ranks that have it open keep their mapping."""
        self._all.release()
        self._map.close()
        os.close(self._descriptor)


class ProgressBox:
    """The box of this rank, created by the rank.

    Phases of a step are timed after the first steps, other phases from the start, and setup and end never.

    Args:
        address: of the boxes.
        number: of the box.
        rank: global rank.

    Attributes:
        learning: whether phases of a step are timed.

    Raises:
        FileNotFoundError: if the process that created the boxes is gone.
    """

    def __init__(self, address: str, number: int, rank: int) -> None:
        descriptor = os.open(address, os.O_RDWR)
        try:
            self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        self._whole = memoryview(self._map).cast("d")
        self._values = values = self._whole[number * _DOUBLES : (number + 1) * _DOUBLES]
        values[_STATE] = _EMPTY
        for index in range(_DOUBLES):
            values[index] = 0.0
        self._longest = [0.0] * len(PHASES)
        self._phase = _INDEX[SETUP]
        self._since = time.monotonic()
        self.learning = False
        self._first_step: int | None = None
        values[_RANK], values[_PROCESS] = rank, os.getpid()
        values[_STATE] = _RUNNING

    @property
    def phase(self) -> str:
        """The current phase."""
        return PHASES[self._phase]

    def begin(self, phase: str) -> None:
        """Start a phase; names that are not in :data:`PHASES` count as ``"other"``."""
        now = time.monotonic()
        before, values = self._phase, self._values
        if before in (_LEARNED if self.learning else _AT_ONCE):
            took = now - self._since
            if took > self._longest[before]:
                self._longest[before] = values[_LONGEST + before] = took
        self._since = now
        self._phase = index = _INDEX.get(phase, _OTHER)
        values[_PHASE] = index
        values[_CHANGES] += 1.0

    def count(self, step: int) -> None:
        """Start a micro-batch; phases of a step are timed after the first steps.

        Args:
            step: optimizer steps of the run.
        """
        self._first_step = step if self._first_step is None else self._first_step
        self.learning = step >= self._first_step + WARM_UP_STEPS
        self._values[_STEP] = step
        self._values[_MICRO_BATCHES] += 1.0

    def close(self) -> None:
        """Mark the run as ended, so that this process is no longer watched."""
        self._values[_STATE] = _ENDED
        self._values.release()
        self._whole.release()
        self._map.close()


_OTHER = _INDEX[OTHER]
_STEPS = (phases.DATA, phases.FORWARD, phases.BACKWARD, phases.OPTIMIZER, phases.HOOKS, phases.AGREEMENT)
# Setup and end happen once, in each rank's own time, so that durations cannot be compared.
_NOT_LEARNED = (SETUP, ENDING, OTHER)
# Phases timed from the start, and those timed after the first steps.
_AT_ONCE = frozenset(_INDEX[name] for name in PHASES if name not in _STEPS + _NOT_LEARNED)
_LEARNED = frozenset(_INDEX[name] for name in PHASES if name not in _NOT_LEARNED)


AUTO = "auto"


@dataclass(frozen=True)
class HangLimits:
    """Seconds without progress after which a rank counts as hanging.

    Each phase of a run (reading data, forward, backward, the optimizer, hooks, a validation batch, saving, ...) has its
    own limit: ``safety_factor`` times its longest duration on any rank of the machine so far, and at least
    ``floor_seconds``. Both are generous, because a false alarm costs a restart.

    Attributes:
        fixed: the same limit for every phase; ``None`` = learned.
        safety_factor: at least 1.
        floor_seconds: lower bound of the limit.
        first_timeout: limit of phases without history.
    """

    fixed: float | None = None
    safety_factor: float = 5.0
    floor_seconds: float = 30.0
    first_timeout: float = 1800.0

    @classmethod
    def of(
        cls, hang_timeout: str | float, safety_factor: float, floor_seconds: float, first_timeout: float
    ) -> HangLimits:
        """Return the limits for the user's options, where ``hang_timeout`` is ``"auto"`` or a number of seconds."""
        fixed = None if hang_timeout == AUTO else float(hang_timeout)
        return cls(fixed, safety_factor, floor_seconds, first_timeout)

    def limit(self, phase: str, ranks: Iterable[Progress]) -> float:
        """Return the current limit of ``phase`` in seconds.

        Args:
            phase: a name of :data:`~trainwright.launch.watchdog.boxes.PHASES`.
            ranks: progress of all ranks of this machine.
        """
        if self.fixed is not None:
            return self.fixed
        seen = [rank.longest[phase] for rank in ranks if phase in rank.longest]
        return max(self.floor_seconds, self.safety_factor * max(seen)) if seen else self.first_timeout

    def slow_limit(self) -> float:
        """Return the limit of work that is known to be slow, such as compilation."""
        return self.first_timeout if self.fixed is None else self.fixed

    def pause(self) -> float:
        """Return the seconds between questions to ranks that had a reason for being slow."""
        return min(self.floor_seconds, self.fixed or self.floor_seconds)
