"""A process that has imported everything heavy and is forked once per rank.

Importing torch and Lightning takes seconds. A fork server does it once for all ranks, while the launching process
composes the configuration on another core; then a rank starts in a few hundredths of a second. The server starts no
threads and computes nothing, so forking it is safe; the launching process itself is never forked.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from trainwright.core.problems import ConfigError
from trainwright.core.processes.orphans import end_with_parent, in_lasting_thread
from trainwright.core.processes.scratch import default_variables, scratch

# A rank starts with these ignored too, see become_ordinary.
_NOT_FOR_THE_SERVER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# NumPy's BLAS starts its threads on import, and a process with threads must not be forked.
_BLAS = {"OPENBLAS_NUM_THREADS": "1"}
_PRELOAD = ("trainwright.launch.ranks.preload",)
# Process id of the server that this module has started; None when there is none, or it is another library's.
_started: int | None = None
# The same in the server itself and in what is forked from it; None where the server is another library's.
_serving: int | None = None


def start_forkserver() -> None:
    """Start the server unless one runs already; returns at once, the imports go on in the background."""
    global _started
    server: Any = forkserver._forkserver
    before = server._forkserver_pid
    if before is None:
        _use_scratch()
        multiprocessing.set_forkserver_preload(list(_PRELOAD))
    with default_variables(_BLAS), _ignoring_signals(), hidden_main():
        in_lasting_thread(forkserver.ensure_running)  # another one, in the place of one that was killed
    if server._forkserver_pid != before:
        _started = server._forkserver_pid


def _use_scratch() -> None:
    """Have sockets and semaphores of multiprocessing lie in our folder, which is removed after kill -9 as well."""
    previous, tempfile.tempdir = tempfile.tempdir, str(scratch())
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = previous


def stop_forkserver() -> None:
    """End the server that `start_forkserver` has started, if any, in the middle of its imports too."""
    global _started
    server: Any = forkserver._forkserver
    if _started is None or server._forkserver_pid != _started:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(_started, signal.SIGKILL)
    server._stop()
    _started = None


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's script again in every new process.

    A rank needs nothing of it, and a script without `if __name__ == "__main__"` would launch itself anew.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def serve() -> None:
    """In the server, before its imports: end with the process that has started it.

    A server whose parent is gone before this finds its pipe closed after the imports, and ends.
    """
    global _serving
    _serving = os.getpid()
    end_with_parent()


def become_ordinary() -> None:
    """In a process forked from the server: end with it, and react to signals and start processes as any process does.

    multiprocessing hands its own start method down: each rank would start a fork server of its own for the workers of
    its data loaders, whose data sets would have to be pickled.
    """
    end_with_parent(_serving)
    multiprocessing.set_start_method(None, force=True)
    for number in _NOT_FOR_THE_SERVER:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _ignoring_signals() -> Iterator[None]:
    """Let the new process start with the signals ignored that may reach all processes of a run.

    At Ctrl-C it would print a traceback during its imports. Without it nobody learns how the ranks end, which save
    first when a scheduler tells them to end.
    """
    if threading.current_thread() is not threading.main_thread():  # where nothing can be changed
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in _NOT_FOR_THE_SERVER}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def call_apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process that the fork server makes.

    Args:
        function: at the top level of a module.
        *arguments: that can be pickled, as what it returns.

    Raises:
        ConfigError: that the function raised; or with its last words, if it failed otherwise.
    """
    start_forkserver()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, arguments), daemon=True)
    try:
        with hidden_main():
            process.start()
        theirs.close()
        is_good, answer = ours.recv()
    except EOFError:
        process.join()
        raise ConfigError([f"{function.__name__} ended without an answer (exit code {process.exitcode})"]) from None
    finally:
        ours.close()
        if process.is_alive():
            process.join(1.0)
            process.kill()
            process.join()
    if not is_good:
        raise ConfigError(answer)
    return answer


def _answer(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    become_ordinary()
    try:
        answer = True, function(*arguments)
    except ConfigError as error:
        answer = False, list(error.problems)
    except Exception as error:
        traceback.print_exc()
        answer = False, [f"{function.__name__} failed: {type(error).__name__}: {error}"]
    connection.send(answer)
    connection.close()
