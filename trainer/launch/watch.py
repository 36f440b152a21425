"""A rank ends in time: after a signal, and when the process that launched it is gone."""

import os
import signal
import threading
from multiprocessing import connection


class ShutdownWatch:
    """A thread that ends this process when it does not end by itself.

    A rank that waits in a collective cannot run Python's signal handlers. The interpreter's C handler however writes
    each signal to a pipe at once, and this thread reads it: after SIGINT or SIGTERM the process has `grace_seconds` to
    end in its own way (Lightning closes loggers and saves what it is asked to), then it ends hard. When the launching
    process dies, kill -9 included, the rank ends at once.

    Args:
        grace_seconds: seconds between the signal and the hard end.
        launcher: file descriptor that becomes readable when the launching process dies; None = not watched.
    """

    def __init__(self, grace_seconds: float, launcher: int | None = None) -> None:
        self._grace_seconds = grace_seconds
        self._launcher = launcher
        self._previous = -1
        self._signals, self._write = os.pipe()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin to watch; only the main thread may call this."""
        os.set_blocking(self._write, False)
        self._previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="trainwright-shutdown-watch", daemon=True).start()

    def stop(self) -> None:
        """End watching; only the main thread may call this."""
        self._stopped.set()
        signal.set_wakeup_fd(self._previous)
        os.close(self._write)  # wakes the thread

    def _watch(self) -> None:
        sources = [self._signals] if self._launcher is None else [self._signals, self._launcher]
        while not self._stopped.is_set():
            ready = connection.wait(sources)
            if self._launcher in ready:
                os._exit(128 + signal.SIGKILL)
            received = os.read(self._signals, 64)
            if not received:
                os.close(self._signals)
                return
            ending = [number for number in received if number in (signal.SIGINT, signal.SIGTERM)]
            if ending and not self._stopped.wait(self._grace_seconds):
                os._exit(128 + ending[0])
