"""A run that was told to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals by which a process is told to end."""


class Interrupted(BaseException):
    """This process was told to end by a signal, and everything it started has ended.

    Not an Exception: code that catches errors to go on must not go on after Ctrl-C.

    Args:
        number: the signal.
        exit_code: of the command; None = 128 plus the number of the signal, as shells have it.
    """

    def __init__(self, number: int, exit_code: int | None = None) -> None:
        self.number = signal.Signals(number)
        self.exit_code = 128 + int(number) if exit_code is None else exit_code
        super().__init__(self.number.name)


def raise_interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """A signal handler that ends what runs now; a Trainer that saves first puts its own in the place of this one."""
    raise Interrupted(number)


class HeldSignals:
    """Raise `Interrupted` where this process is told to end, but not within :meth:`held`: there, at its end.

    A context manager, which puts the handlers of the caller back; in threads other than the main one it does nothing.
    An exception that a signal handler raises within compiled code may come out of it as another one (Ray's makes a
    SystemError of it), and the run would not know that it was told to end.

    Args:
        more: signals besides SIGTERM, SIGINT, SIGHUP and SIGQUIT.
    """

    def __init__(self, more: Iterable[int] = ()) -> None:
        self._numbers = {*ENDING, *more}
        self._previous: dict[int, Any] = {}
        self._depth = 0
        self._noted: int | None = None

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._hear) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """What runs within is not interrupted; it must not take long."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._noted is not None and self._depth == 0:
            number, self._noted = self._noted, None
            raise Interrupted(number)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._depth > 0:
            self._noted = number
            return
        raise Interrupted(number)
