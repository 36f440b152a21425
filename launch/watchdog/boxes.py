"""Progress boxes: what each rank of a machine is doing, in memory that the ranks share with whoever watches them.

A rank writes, a monitor reads; neither waits for the other, and writing costs about a microsecond. All numbers are
doubles of eight aligned bytes, so that none is ever read half-written.

The memory has no name in any folder (``memfd``), so a killed process leaves nothing; others of the same user open it
as ``/proc/<process>/fd/<number>``. Where there is no such memory (not Linux), it is a file in the given folder.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

from trainwright.core.run import phases

# Phases beyond those of trainwright.core.run.phases: reading the first batch of an epoch starts worker processes.
SETUP, FIRST_DATA = "setup", "first data"
OUTSIDE_OF_STEPS = EVALUATION, EVALUATION_END, ENDING, OTHER = "evaluation", "end of evaluation", "ending", "other"
PHASES = (SETUP, FIRST_DATA, *phases.PHASES, *OUTSIDE_OF_STEPS)
_INDEX = {name: index for index, name in enumerate(PHASES)}
# Doubles of one box: twelve of what the rank is doing, then the longest time that each phase took.
_PROCESS, _STATE, _RANK, _PHASE, _STEP, _MICRO_BATCHES, _CHANGES = range(7)
_LONGEST = 12
_DOUBLES = 32
_BOX_BYTES = 8 * _DOUBLES
_EMPTY, _RUNNING, _ENDED = 0.0, 1.0, 2.0
# Optimizer steps of which no time is learned: compilation, first allocations, cold caches.
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Progress:
    """What a rank was doing when its box was read.

    Attributes:
        process: process id; 0 = no rank has taken this box yet.
        rank: global rank.
        running: whether the rank is within a run: from setup to teardown.
        phase: a name of :data:`PHASES`.
        step: optimizer steps that the run had made, those before a resume included.
        micro_batches: micro-batches that this process has begun.
        changes: number of phases that this process has begun.
        longest: phase -> longest time it took so far, in seconds; what has not been seen is absent.
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
    """The boxes of the ranks of a machine. To be made by the process that watches.

    Args:
        count: number of boxes.
        folder: for the file, where the system has no memory without a name.

    Attributes:
        address: path by which the ranks open them, as long as this object is not closed.
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
        """What the rank of a box is doing now."""
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
        """Give the memory back; ranks that have it open keep theirs."""
        self._all.release()
        self._map.close()
        os.close(self._descriptor)


class ProgressBox:
    """The box of this rank. To be made by the rank.

    Times are learned of phases of a step after the first steps, of others from the beginning, and of setting up and
    ending never.

    Args:
        address: of the boxes.
        number: which one.
        rank: global rank.

    Attributes:
        learning: whether phases of a step are timed.

    Raises:
        FileNotFoundError: if who made the boxes is gone.
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
        """The phase that was begun last."""
        return PHASES[self._phase]

    def begin(self, phase: str) -> None:
        """Say that a phase begins; names that are not in :data:`PHASES` count as ``"other"``."""
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
        """Say that a micro-batch begins, and learn phases of a step from the end of the first steps on.

        Args:
            step: optimizer steps that the run has made.
        """
        self._first_step = step if self._first_step is None else self._first_step
        self.learning = step >= self._first_step + WARM_UP_STEPS
        self._values[_STEP] = step
        self._values[_MICRO_BATCHES] += 1.0

    def close(self) -> None:
        """Say that the run has ended: what this process does now concerns nobody."""
        self._values[_STATE] = _ENDED
        self._values.release()
        self._whole.release()
        self._map.close()


_OTHER = _INDEX[OTHER]
_STEPS = (phases.DATA, phases.FORWARD, phases.BACKWARD, phases.OPTIMIZER, phases.HOOKS, phases.AGREEMENT)
# Ranks set up and end once, and each in its own time: how long one took says nothing of another.
_NOT_LEARNED = (SETUP, ENDING, OTHER)
# What is learned from the beginning, and what once the first steps are done.
_AT_ONCE = frozenset(_INDEX[name] for name in PHASES if name not in _STEPS + _NOT_LEARNED)
_LEARNED = frozenset(_INDEX[name] for name in PHASES if name not in _NOT_LEARNED)
