"""Signals that end a run, while a library is called that must not be interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from trainwright.core.run.interrupt import ENDING, Interrupted


class HeldSignals:
    """Raises `Interrupted` where this process is told to end, but not within :meth:`held`: there, at its end.

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
