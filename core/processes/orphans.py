"""Processes that end with the one that has started them, `kill -9` included.

The kernel kills them (PR_SET_PDEATHSIG of Linux, see prctl(2)), which ends a process that is stopped, or in which no
thread of Python can run, as well. On other systems nothing happens.

What the kernel calls the parent is the thread that has started the process: it kills when that thread ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from trainwright.core.processes.process import is_alive

AGENT = "TRAINWRIGHT_AGENT"
"""Variable by which an agent tells its ranks its process id, so that they end with it."""
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the thread that has started it is gone.

    Args:
        parent: process id that the parent must have; where it has another one, the parent ended before the kernel was
            asked, and this process ends now. None = not known.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_agent() -> None:
    """End with the agent that has started this process as a rank: ours (:data:`AGENT`), or torchrun's.

    torchrun says no process id. A rank whose agent is gone before this call finds nobody to meet.
    """
    agent = os.environ.pop(AGENT, None)  # programs that this rank starts have another parent
    if agent is not None:
        end_with_parent(int(agent))
    elif {"TORCHELASTIC_RUN_ID", "RANK"} <= os.environ.keys():
        end_with_parent()


def end_with_main_thread() -> None:
    """End with the main thread of the parent, if that has started this process.

    Another thread may end long before its process does, which still uses what it has started: then nothing happens.
    A process of multiprocessing whose parent has ended before this call ends now: whoever has adopted it is no parent
    to wait for.
    """
    parent = os.getppid()
    with suppress(OSError):  # not Linux, or a kernel that does not tell
        if str(os.getpid()) in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            end_with_parent(parent)
    starter = multiprocessing.parent_process()
    if starter is not None and starter.pid is not None and not is_alive(starter.pid):
        os.kill(os.getpid(), signal.SIGKILL)


def in_lasting_thread(start: Callable[[], None]) -> None:
    """Call `start`, which starts a process, in a thread that ends with this process, and wait for it.

    Raises:
        BaseException: that `start` raised.
    """
    if threading.current_thread() is threading.main_thread():
        start()
        return
    answer: Future[None] = Future()
    _lasting(os.getpid()).put((start, answer))
    answer.result()


@cache
def _lasting(process: int) -> SimpleQueue[tuple[Callable[[], None], Future[None]]]:
    """Calls for a thread that never ends; `process` is this one, since forked ones have no such thread."""
    calls: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()

    def work() -> None:
        while True:
            start, answer = calls.get()
            try:
                answer.set_result(start())
            except BaseException as error:
                answer.set_exception(error)

    threading.Thread(target=work, name="trainwright-parent", daemon=True).start()
    return calls
