"""Fork server that has imported torch and Lightning, forked once per rank.

The imports take seconds. The server does them once for all ranks, while the launching process composes the
configuration on another core; then a rank starts within hundredths of a second. The server has no threads and computes
nothing, so it is safe to fork; the launching process itself is never forked.
"""

import contextlib
import gc
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
from trainwright.core.processes.machine import num_cores
from trainwright.core.processes.orphans import end_with_parent, in_lasting_thread
from trainwright.core.processes.scratch import default_variables, scratch
from trainwright.strategies.contract.attributes import with_attributes

# Ranks inherit these as ignored, see restore_defaults.
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# NumPy's BLAS starts threads on import, and a process with threads must not be forked.
_BLAS = {"OPENBLAS_NUM_THREADS": "1"}
_PRELOAD = ("trainwright.launch.ranks.preload",)
# Process id of the server started by this module; None = there is none, or another library started it.
_started: int | None = None
# The same within the server and its forks; None = another library's server.
_serving: int | None = None


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Disable Python's cyclic garbage collector during imports, which create no garbage.

    It saves 0.7 of 4.9 seconds of CPU for torch, Lightning and this package. What was imported lives as long as the
    process, so later collections exclude it: each would take 0.2 s, and write to memory that ranks share.
    """
    was_enabled, are_first = gc.isenabled(), "lightning" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if are_first:  # else the caller's own objects, a model of a notebook among them, would never be freed
            gc.freeze()
        if was_enabled:
            gc.enable()


def start_forkserver() -> None:
    """Start the server unless it runs; return at once, its imports continue in the background."""
    global _started
    server: Any = forkserver._forkserver
    before = server._forkserver_pid
    if before is None:
        _use_scratch()
        multiprocessing.set_forkserver_preload(list(_PRELOAD))
    with default_variables(_BLAS), _signals_ignored(), hidden_main():
        in_lasting_thread(forkserver.ensure_running)  # also restarts a server that was killed
    if server._forkserver_pid != before:
        _started = server._forkserver_pid


def has_forkserver() -> bool:
    """Return whether :func:`start_forkserver` has started a server."""
    return _started is not None


def _use_scratch() -> None:
    """Put multiprocessing's sockets and semaphores into our scratch folder, which is removed even after kill -9."""
    with with_attributes(tempfile, tempdir=str(scratch())):
        util.get_temp_dir()


def stop_forkserver() -> None:
    """Kill the server that `start_forkserver` has started, if any, even during its imports."""
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
    """Keep multiprocessing from importing the caller's script in every new process.

    A rank does not need it, and a script without `if __name__ == "__main__"` would launch itself again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def serve() -> None:
    """Tie the server's lifetime to the process that started it; called in the server before its imports.

    If that process is gone already, the server finds its pipe closed after the imports, and exits.
    """
    global _serving
    _serving = os.getpid()
    end_with_parent()


def restore_defaults() -> None:
    """Restore default signal handlers and start method in a forked process, and tie its lifetime to the server's.

    Children inherit multiprocessing's start method: each rank would start a fork server for its data loader workers,
    whose data sets would have to be pickled.
    """
    end_with_parent(_serving)
    multiprocessing.set_start_method(None, force=True)
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """Start the new process with the signals ignored that may reach all processes of a run.

    On Ctrl-C it would print a traceback during its imports. If it died, the exit codes of ranks that save before they
    exit would be lost.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers can only be set in the main thread
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in _IGNORED_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def call_in_subprocess(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process forked from the server.

    Args:
        function: at the top level of a module.
        *arguments: picklable, like the result.

    Raises:
        ConfigError: raised by the function, or naming its failure.
    """
    start_forkserver()
    return _call("forkserver", function, arguments)


def call_in_fork(function: Callable[..., Any], *arguments: Any, meanwhile: Callable[[], None]) -> Any:
    """Call a function in a fork of this process and something else in this one.

    Where a fork is unsafe (this process has threads, or is not on Linux) or gains nothing (it has imported torch, or
    has one core), the function is called here, and nothing meanwhile.

    Args:
        function: with a picklable result; what else it changes is lost with its process.
        *arguments: of the function.
        meanwhile: imports that this process will probably need.

    Raises:
        ConfigError: raised by the function, or naming its failure.
    """
    gains = num_cores() > 1 and "torch" not in sys.modules
    if not gains or threading.active_count() > 1 or sys.platform != "linux":
        return function(*arguments)
    return _call("fork", function, arguments, meanwhile)


def _call(
    method: str, function: Callable[..., Any], arguments: tuple[Any, ...], meanwhile: Callable[[], None] | None = None
) -> Any:
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run_and_send, args=(theirs, function, arguments))
    try:
        with hidden_main():
            process.start()
        theirs.close()
        if meanwhile is not None:
            meanwhile()
        is_good, answer = ours.recv()
    except EOFError:
        process.join()
        raise ConfigError([f"{function.__name__} ended without an answer (exit code {process.exitcode})"]) from None
    except BaseException:
        if process.is_alive():
            process.kill()
        raise
    finally:
        ours.close()
        if process.is_alive():
            process.join(1.0)
            process.kill()
            process.join()
    if not is_good:
        raise ConfigError(answer)
    return answer


def _run_and_send(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    restore_defaults()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller answers Ctrl-C, and kills this process
    try:
        answer = True, function(*arguments)
    except ConfigError as error:
        answer = False, list(error.problems)
    except Exception as error:
        traceback.print_exc()
        answer = False, [f"{function.__name__} failed: {type(error).__name__}: {error}"]
    finally:
        stop_forkserver()
    connection.send(answer)
    connection.close()
