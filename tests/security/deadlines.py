"""Deadlines for tests of hostile input."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class LateError(BaseException):
    """Slips through every ``except Exception``."""


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raise :class:`LateError` after a number of seconds."""

    def late(*_: Any) -> None:
        raise LateError(f"more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
