"""Phases of a step, announced by the loop to listeners that watch progress or measure time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

# In the order of a micro-batch. "certificate": comparisons with the module as written; "hooks": of callbacks and the
# module after it; "validation": within training; "agreement": ranks agree on whether to end; "saving": a checkpoint, at
# any time; "idle": before and after training.
PHASES = DATA, CERTIFICATE, FORWARD, BACKWARD, OPTIMIZER, HOOKS, VALIDATION, AGREEMENT, SAVING, IDLE = (
    "data", "certificate", "forward", "backward", "optimizer", "hooks", "validation", "agreement", "saving", "idle",
)  # fmt: skip
Listener = Callable[[str], None]


class Phases:
    """Dispatcher of phase changes to listeners; nearly free without listeners.

    With a profiler, or under manual optimization, the inside of a step is ``"forward"`` only.
    """

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._current = IDLE

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with the name of each phase as it begins; return a function that unsubscribes it."""
        self._listeners = (*self._listeners, listener)
        return lambda: self._remove(listener)

    def begin(self, phase: str) -> None:
        """Announce the beginning of ``phase``, which ends the previous one."""
        self._current = phase
        for listener in self._listeners:
            listener(phase)

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Announce work that interrupts a phase, such as saving, and the interrupted phase again at its end."""
        before = self._current
        self.begin(phase)
        try:
            yield
        finally:
            self.begin(before)

    def _remove(self, listener: Listener) -> None:
        # By identity: listeners may compare equal. A new tuple: a listener may unsubscribe while it is called.
        self._listeners = tuple(each for each in self._listeners if each is not listener)
