"""What this rank is doing within a step: told by the loop, heard by whoever watches progress or measures time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

# In the order of a micro-batch. "hooks" is what callbacks and the module do after it; "validation" the loop within
# training; "agreement" where the loop asks all ranks whether one was told to end; "saving" a checkpoint, whenever that
# is; "idle" before and after training.
PHASES = DATA, FORWARD, BACKWARD, OPTIMIZER, HOOKS, VALIDATION, AGREEMENT, SAVING, IDLE = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "hooks",
    "validation",
    "agreement",
    "saving",
    "idle",
)
Listener = Callable[[str], None]


class Phases:
    """Passes on which phase begins; costs next to nothing while nobody listens.

    With a profiler set, or where the module optimizes manually, the inside of a step is told as ``"forward"`` alone.
    """

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._current = IDLE

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` called with the name of each phase as it begins; returns how to end that."""
        self._listeners = (*self._listeners, listener)
        return lambda: self._remove(listener)

    def begin(self, phase: str) -> None:
        """Say that ``phase`` begins, which ends the one before."""
        self._current = phase
        for listener in self._listeners:
            listener(phase)

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Around work that interrupts a phase, such as saving; the interrupted one goes on afterwards."""
        before = self._current
        self.begin(phase)
        try:
            yield
        finally:
            self.begin(before)

    def _remove(self, listener: Listener) -> None:
        # By identity: two listeners may compare equal. A tuple, so that a listener may leave while it is called.
        self._listeners = tuple(each for each in self._listeners if each is not listener)
