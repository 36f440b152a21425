"""Bounded shutdown of a rank: after a signal, or when its launching process dies."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing import connection
from typing import ClassVar

# Written to the pipe in place of a signal number: the deadline has changed.
_LOOK_AGAIN = b"\0"


@dataclass(frozen=True)
class Allowance:
    """More time than `grace_seconds` for a process that saves before it ends.

    Attributes:
        numbers: signals that it applies to.
        seconds: between the signal and the forced exit; None = no limit.
        exit_code: of the forced exit, by signal number.
        last_words: called before the forced exit, in the watching thread.
    """

    numbers: Collection[int]
    seconds: float | None
    exit_code: Callable[[int], int]
    last_words: Callable[[int], None]


@dataclass(frozen=True)
class _End:
    at: float
    number: int


class ShutdownWatch:
    """A thread that forces this process to exit when it does not end by itself.

    A rank blocked in a collective cannot run Python's signal handlers, but the interpreter's C handler writes each
    signal to a pipe, which this thread reads: after SIGINT or SIGTERM the process has `grace_seconds` to end normally
    (Lightning closes loggers and saves), then it is ended. It also ends at once when the launching process dies, by
    kill -9 too. A process has at most one watch, see :meth:`of_process`.

    Args:
        grace_seconds: seconds between the signal and the forced exit; None = only the limits of :meth:`allow`.
        launcher: file descriptor that becomes readable when the launching process dies; None = not watched.
    """

    _of_process: ClassVar[ShutdownWatch | None] = None

    def __init__(self, grace_seconds: float | None, launcher: int | None = None) -> None:
        self._grace_seconds = grace_seconds
        self._launcher = launcher
        self._previous = -1
        self._signals, self._write = os.pipe()
        self._stopped = False
        self._allowance: Allowance | None = None
        self._end: _End | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def start_in_rank(cls, grace_seconds: float) -> None:
        """Watch this rank of a launcher, and end it with that process; call it in the main thread.

        Args:
            grace_seconds: to end after SIGINT or SIGTERM.
        """
        launcher = multiprocessing.parent_process()
        assert launcher is not None
        cls(grace_seconds, launcher.sentinel).start()

    @classmethod
    def of_process(cls) -> ShutdownWatch | None:
        """Return the watch of this process; None if it has none."""
        return cls._of_process

    def start(self) -> None:
        """Start watching; only the main thread may call this."""
        os.set_blocking(self._write, False)
        self._previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        ShutdownWatch._of_process = self
        self._thread = threading.Thread(target=self._watch, name="trainwright-shutdown-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; only the main thread may call this."""
        self._stopped = True
        signal.set_wakeup_fd(self._previous)
        if ShutdownWatch._of_process is self:
            ShutdownWatch._of_process = None
        self._wake()  # a forked child may hold the pipe open
        os.close(self._write)
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def allow(self, allowance: Allowance) -> Callable[[], None]:
        """Give the process more time after certain signals; return a function that undoes it.

        A signal that has already arrived keeps its deadline.
        """
        self._allowance = allowance

        def undo() -> None:
            if self._allowance is allowance:
                self._allowance = None

        return undo

    def end_at(self, moment: float, number: int) -> None:
        """Force an exit at `moment` (of `time.monotonic`) at the latest, as if by the signal `number`."""
        self._set_end(moment, number)
        if not self._stopped:
            self._wake()

    def _wake(self) -> None:
        # A full pipe wakes the thread too; a broken one means that it has ended.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._write, _LOOK_AGAIN)

    def _watch(self) -> None:
        sources = [self._signals] if self._launcher is None else [self._signals, self._launcher]
        while not self._stopped:
            ready = connection.wait(sources, self._rest())
            if self._launcher in ready:
                os._exit(128 + signal.SIGKILL)
            if self._signals in ready:
                received = os.read(self._signals, 64)
                if not received:
                    break
                for number in received:
                    self._begin_to_end(number)
            if self._rest() == 0 and not self._stopped:
                self._end_hard()
        os.close(self._signals)

    def _rest(self) -> float | None:
        return None if self._end is None else max(0.0, self._end.at - time.monotonic())

    def _begin_to_end(self, number: int) -> None:
        allowance = self._allowance
        if allowance is not None and number in allowance.numbers:
            seconds = allowance.seconds
        elif number in (signal.SIGINT, signal.SIGTERM):
            seconds = self._grace_seconds
        else:
            return
        if seconds is not None:
            self._set_end(time.monotonic() + seconds, number)

    def _set_end(self, moment: float, number: int) -> None:
        if self._end is None or moment < self._end.at:
            self._end = _End(moment, number)

    def _end_hard(self) -> None:
        assert self._end is not None
        number, allowance = self._end.number, self._allowance
        if allowance is None or number not in allowance.numbers:
            os._exit(128 + number)
        with contextlib.suppress(Exception):
            allowance.last_words(number)
        os._exit(allowance.exit_code(number))


def _forget_in_child() -> None:
    """Detach a forked child, which shares the pipe: its signals would end this process."""
    if ShutdownWatch._of_process is not None:
        ShutdownWatch._of_process = None
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_child)
