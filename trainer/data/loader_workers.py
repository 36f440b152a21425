"""Worker processes of data loaders, when a run is told to end.

A scheduler sends SIGTERM to every process of a job. torch's workers die of it, and the rank, which wants to finish its
step and save, fails because its loader has lost them. So a worker heeds only its own rank, which ends it when it is no
longer needed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.core.processes.orphans import end_with_main_thread
from trainwright.trainer.data.wrapped_loader import innermost

_HEEDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def spare_workers(loader: Any) -> None:
    """Let the worker processes of a loader outlive the signals that tell a run to end, as long as their rank does.

    Args:
        loader: any; what has no worker processes, or a system that does not tell who sends a signal, is left alone.
    """
    inner = innermost(loader)
    if not getattr(inner, "num_workers", 0) or not hasattr(inner, "worker_init_fn") or not _can_tell_senders():
        return
    if not isinstance(inner.worker_init_fn, HeedsItsRank):
        inner.worker_init_fn = HeedsItsRank(inner.worker_init_fn)


def _can_tell_senders() -> bool:
    return hasattr(signal, "sigwaitinfo")  # not on macOS


class HeedsItsRank:
    """A ``worker_init_fn`` after which a worker ends by a signal of its own rank alone, and with that rank.

    Args:
        init: the ``worker_init_fn`` that is called then; ``None``: there is none.
    """

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self.init = init

    def __call__(self, worker_id: int) -> None:
        """Begin to heed only this process's parent."""
        end_with_main_thread()
        # Blocked in all threads to come, so that the signals wait for the one that looks where they come from.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEEDED)
        os.register_at_fork(after_in_child=_unblock)
        _let_programs_be_ended()
        threading.Thread(target=_wait, args=(os.getppid(),), name="trainwright-worker", daemon=True).start()
        if self.init is not None:
            self.init(worker_id)


def _wait(rank: int) -> None:
    while True:
        received = signal.sigwaitinfo(_HEEDED)
        if received.si_signo == signal.SIGTERM and (received.si_pid == rank or os.getppid() != rank):
            os._exit(0)  # as torch's own handler does


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEEDED)


@contextmanager
def _unblocked() -> Iterator[None]:
    _unblock()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEEDED)


def _let_programs_be_ended() -> None:
    """A program that a data set starts (a decoder, say) would inherit the blocked signals, and never be terminated."""
    popen: Any = subprocess.Popen
    start = popen._execute_child

    def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _unblocked():
            return start(self, *args, **kwargs)

    popen._execute_child = execute
