"""Processes that end with their parent, even when that is killed with `kill -9`.

The kernel kills them (PR_SET_PDEATHSIG of Linux, see prctl(2)), also when they are stopped or block the GIL. On other
systems nothing happens. The kernel's "parent" is the thread that started the process: it kills when that thread ends.
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
"""Environment variable with the process id of the agent, so that its ranks end with it."""
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Args:
        parent: expected process id of the parent; if it differs, the parent ended before this call and this process is
            killed now. None = not checked.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_agent() -> None:
    """End with the agent that started this process as a rank: ours (:data:`AGENT`), or torchrun's.

    torchrun does not pass its process id; a rank whose agent ended before this call fails to meet the others.
    """
    agent = os.environ.pop(AGENT, None)  # not inherited by programs that this rank starts
    if agent is not None:
        end_with_parent(int(agent))
    elif {"TORCHELASTIC_RUN_ID", "RANK"} <= os.environ.keys():
        end_with_parent()


def end_with_main_thread() -> None:
    """End with the main thread of the parent, if that started this process.

    Does nothing if another thread did, which may end long before its process. A multiprocessing child whose parent has
    already ended is killed now.
    """
    parent = os.getppid()
    with suppress(OSError):  # not Linux, or a kernel without this file
        if str(os.getpid()) in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            end_with_parent(parent)
    starter = multiprocessing.parent_process()
    if starter is not None and starter.pid is not None and not is_alive(starter.pid):
        os.kill(os.getpid(), signal.SIGKILL)


def in_lasting_thread(start: Callable[[], None]) -> None:
    """Call `start`, which starts a process, in a thread that lives as long as this process, and wait for it.

    Raises:
        BaseException: raised by `start`.
    """
    if threading.current_thread() is threading.main_thread():
        start()
        return
    answer: Future[None] = Future()
    _lasting(os.getpid()).put((start, answer))
    answer.result()


@cache
def _lasting(process: int) -> SimpleQueue[tuple[Callable[[], None], Future[None]]]:
    """Return the queue of a thread that never ends; `process` is the cache key, since forks lack the thread."""
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
