"""Forked processes that are killed while they save checkpoints."""

import io
import os
import signal
import struct
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.checkpoint.store import publish

STEP = struct.Struct("<q")
STARTED = -1


class Child:
    """A forked process and its reports."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._pipe = pipe

    def wait_until_started(self) -> None:
        assert STEP.unpack(os.read(self._pipe, STEP.size)) == (STARTED,)

    def end(self, number: int | None = None) -> tuple[list[int], int]:
        """Send a signal, if any, and wait; return the reported steps and the exit status of ``os.waitpid``."""
        if number is not None:
            os.kill(self.pid, number)
        data = b""
        while block := os.read(self._pipe, 1 << 16):
            data += block
        os.close(self._pipe)
        _, status = os.waitpid(self.pid, 0)
        return [step for (step,) in STEP.iter_unpack(data)], status


@contextmanager
def forked(work: Callable[[Callable[[int], None]], Any]) -> Iterator[Child]:
    """Fork a process that calls ``work(report)``, and kill it at the end."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(receiving)
            os.write(sending, STEP.pack(STARTED))
            work(lambda step: os.write(sending, STEP.pack(step)) and None)
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(sending)
    child = Child(pid, receiving)
    try:
        yield child
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def without_swap() -> None:
    """Simulate a system that cannot exchange two names."""
    publish._swap = lambda one, other: False


# System calls by which a save changes the disk.
_CALLS = [(os, name) for name in ("mkdir", "rename", "fsync", "unlink", "rmdir")]


def at_call(number: int, act: Callable[[], None]) -> None:
    """Call ``act`` just before the ``number``-th change of the disk, counted from 0."""
    lock = threading.Lock()
    count = [0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                mine = count[0]
                count[0] += 1
            if mine == number:
                act()
            return function(*args, **kwargs)

        return call

    for module, name in _CALLS:
        setattr(module, name, counted(getattr(module, name)))
    publish._swap = counted(publish._swap)
    file = io.FileIO
    io.FileIO = lambda *args: counted(file)(*args)  # type: ignore[misc,assignment]
