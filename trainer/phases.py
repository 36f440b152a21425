"""What this rank is doing within a step: told by the loop, heard by whoever watches progress or measures time."""

from __future__ import annotations

from collections.abc import Callable

# In the order of a micro-batch. "hooks" is what callbacks and the module do after it; "validation" the loop within
# training; "idle" before and after training.
DATA, FORWARD, BACKWARD, OPTIMIZER, HOOKS, VALIDATION, IDLE = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "hooks",
    "validation",
    "idle",
)
Listener = Callable[[str], None]


class Phases:
    """Passes on which phase begins; costs next to nothing while nobody listens.

    With a profiler set, or where the module optimizes manually, the inside of a step is told as ``"forward"`` alone.
    """

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` called with the name of each phase as it begins; returns how to end that."""
        self._listeners = (*self._listeners, listener)
        return lambda: self._remove(listener)

    def begin(self, phase: str) -> None:
        """Say that ``phase`` begins, which ends the one before."""
        for listener in self._listeners:
            listener(phase)

    def _remove(self, listener: Listener) -> None:
        # By identity: two listeners may compare equal. A tuple, so that a listener may leave while it is called.
        self._listeners = tuple(each for each in self._listeners if each is not listener)
