"""A run that was told to end."""

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import NoReturn

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


@contextlib.contextmanager
def interrupted_by_signals(more: Iterable[int]) -> Iterator[None]:
    """Raise `Interrupted` where this process is told to end, and put the handlers of the caller back after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, raise_interrupted) for number in {*ENDING, *more}}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
