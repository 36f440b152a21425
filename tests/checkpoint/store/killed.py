"""Processes that save checkpoints until something ends them."""

import io
import os
import signal
import struct
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.checkpoint.store import publish as exchange

STEP = struct.Struct("<q")
BEGUN = -1


class Child:
    """A forked process and what it reported before it ended."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._pipe = pipe
        self._reported: list[int] = []

    def wait_until_begun(self) -> None:
        assert STEP.unpack(os.read(self._pipe, STEP.size)) == (BEGUN,)

    def wait_for_report(self) -> None:
        self._reported += STEP.unpack(os.read(self._pipe, STEP.size))

    def end(self, number: int | None = None) -> tuple[list[int], int]:
        """Send a signal, if any, and wait: the reported steps, and the exit status as ``os.waitpid`` gives it."""
        if number is not None:
            os.kill(self.pid, number)
        data = b""
        while block := os.read(self._pipe, 1 << 16):
            data += block
        os.close(self._pipe)
        _, status = os.waitpid(self.pid, 0)
        return [*self._reported, *(step for (step,) in STEP.iter_unpack(data) if step != BEGUN)], status


@contextmanager
def forked(work: Callable[[Callable[[int], None]], Any]) -> Iterator[Child]:
    """A forked process that calls ``work(report)``; whatever happens, none is left."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            # Whatever earlier tests of this process have left: a signal ends the child.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(receiving)
            os.write(sending, STEP.pack(BEGUN))
            work(lambda step: os.write(sending, STEP.pack(step)) and None)
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException:
            traceback.print_exc()  # what the parent sees is that the child has ended
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
    """As on a system that cannot exchange two names."""
    exchange._swap = lambda one, other: False


# Everything by which a checkpoint changes what is on the disk; each is one instant between two states of it.
_CALLS = [(os, name) for name in ("mkdir", "rename", "fsync", "unlink", "rmdir")]


def at_call(number: int, act: Callable[[], None]) -> None:
    """Let ``act`` happen just before the ``number``-th change of the disk, counted from 0."""
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
    exchange._swap = counted(exchange._swap)
    file = io.FileIO
    io.FileIO = lambda *args: counted(file)(*args)  # type: ignore[misc,assignment]
