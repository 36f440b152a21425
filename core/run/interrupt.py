"""Interruption of a run by signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that ask a process to end."""


class Interrupted(BaseException):
    """A signal that asked this process to end; everything it started has ended.

    Not an Exception, so that code that recovers from errors does not swallow Ctrl-C.

    Args:
        number: the signal.
        exit_code: of the command; None = 128 plus the signal number, as in shells.
    """

    def __init__(self, number: int, exit_code: int | None = None) -> None:
        self.number = signal.Signals(number)
        self.exit_code = 128 + int(number) if exit_code is None else exit_code
        super().__init__(self.number.name)


def raise_interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal by raising :class:`Interrupted`; a Trainer that saves first replaces this handler."""
    raise Interrupted(number)


class DeferredSignals:
    """Context manager that raises `Interrupted` on signals, deferred within :meth:`deferred` until its end.

    It restores the previous handlers on exit, and does nothing in threads other than the main one. An exception raised
    by a signal handler within compiled code may surface as another one (Ray turns it into a SystemError), which would
    hide the interruption.

    Args:
        more: signals besides SIGTERM, SIGINT, SIGHUP and SIGQUIT.
    """

    def __init__(self, more: Iterable[int] = ()) -> None:
        self._numbers = {*ENDING, *more}
        self._previous: dict[int, Any] = {}
        self._depth = 0
        self._noted: int | None = None

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer interruptions until the end of the context, which must be short."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._noted is not None and self._depth == 0:
            number, self._noted = self._noted, None
            raise Interrupted(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._depth > 0:
            self._noted = number
            return
        raise Interrupted(number)


class InsistentSignals(DeferredSignals):
    """Context manager that raises `Interrupted` on signals, and again on exit if code within has hidden it.

    Imports do: torch swallows an exception that is raised while it loads NumPy.
    """

    _raised: int | None = None

    def __exit__(self, *raised: object) -> None:
        super().__exit__()
        if self._raised is not None and not isinstance(raised[1], Interrupted):
            raise Interrupted(self._raised)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._raised = number
        super()._handle(number, frame)
