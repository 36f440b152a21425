"""The cause of a thread's wait, from its stack."""

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.core.processes.process import RUNNING
from trainwright.launch.watchdog.report.stacks import Frame, Thread

COMMUNICATION, TORCH, DATA, LOCK, QUEUE, THREAD = "communication", "torch", "data", "lock", "queue", "thread"
PROCESS, NETWORK, SLEEP, COMPUTING = "process", "network", "sleep", "computing"
NATIVE, DEBUGGER, COMPILING = "native", "debugger", "compiling"

# (part of a library's path, its functions or None = all, kind, words for reports).
_KNOWN: tuple[tuple[str, tuple[str, ...] | None, str, str], ...] = (
    ("/threading.py", ("join", "_wait_for_tstate_lock"), THREAD, "waiting for a thread to end"),
    ("/threading.py", None, LOCK, "waiting for a lock or a condition"),
    ("/queue.py", ("get",), QUEUE, "waiting for something to be put into a queue"),
    ("/queue.py", ("put",), QUEUE, "waiting for room in a queue"),
    ("/concurrent/futures/", None, THREAD, "waiting for the result of another thread or process"),
    ("/multiprocessing/synchronize.py", None, LOCK, "waiting for a lock that processes share"),
    ("/multiprocessing/", None, PROCESS, "waiting for another process"),
    ("/subprocess.py", None, PROCESS, "waiting for a program that it has started"),
    ("/selectors.py", None, NATIVE, "waiting for input"),
    ("/socket.py", None, NETWORK, "waiting for the network"),
    ("/ssl.py", None, NETWORK, "waiting for the network"),
    ("/torch/utils/data/", None, DATA, "waiting for a worker process of its data loader"),
    ("/torch/distributed/checkpoint/", None, NATIVE, "saving or loading"),
    ("/torch/distributed/", None, COMMUNICATION, "waiting for other ranks"),
    ("/torch/", None, TORCH, "computing in torch"),
)
# On the stack only during compilation, not when compiled code runs.
_COMPILERS = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py", "/triton/compiler/")
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd")


@dataclass(frozen=True)
class Wait:
    """The cause of a wait.

    Attributes:
        kind: ``COMMUNICATION``, ``LOCK``, ... of this module.
        words: for reports, as in "waiting for a lock".
    """

    kind: str
    words: str


def wait_of(thread: Thread) -> Wait:
    """Return what a thread waits for, as far as its stack shows."""
    if any(part in frame.file for frame in thread.frames for part in _DEBUGGERS):
        return Wait(DEBUGGER, "in a debugger")
    if any(part in frame.file for frame in thread.frames for part in _COMPILERS):
        return Wait(COMPILING, "compiling")
    found = list(_innermost_known(thread))
    telling = [wait for wait in found if wait.kind != TORCH]
    if telling:
        wait = telling[-1]
        computes = wait.kind == COMMUNICATION and thread.state == RUNNING
        return Wait(COMPUTING, "computing") if computes else wait
    return found[0] if found else _at_line(thread)


def acting_thread(threads: tuple[Thread, ...]) -> Thread:
    """Return the thread that does the rank's work: the main one, or autograd's if it runs the user's backward hooks.

    Args:
        threads: the main thread first.
    """
    main = threads[0]
    if main.frames and "/torch/autograd/" in main.frames[0].file:
        # A device thread of autograd; it was not started by Python, so it has no name.
        return next((thread for thread in threads[1:] if not thread.name and thread.users), main)
    return main


def _innermost_known(thread: Thread) -> Iterator[Wait]:
    """Yield the meaning of the innermost frames as long as they are known: a queue uses a lock, a loader a queue."""
    for frame in thread.frames:
        wait = None if frame.is_users else _known(frame)
        if wait is None:
            return
        yield wait


def _known(frame: Frame) -> Wait | None:
    function = frame.function.rpartition(".")[2]
    for part, functions, kind, words in _KNOWN:
        if part in frame.file and (functions is None or function in functions):
            return Wait(kind, words)
    return None


def _at_line(thread: Thread) -> Wait:
    """Return the wait of the innermost line itself."""
    if not thread.frames:
        return Wait(NATIVE, "in native code")
    frame = thread.frames[0]
    called = frame.text.split("(")[0]
    if frame.holds_lock or called.endswith(".acquire"):
        return Wait(LOCK, "waiting for a lock")
    if called.endswith("sleep"):
        return Wait(SLEEP, "sleeping")
    if called.endswith(".wait"):
        return Wait(COMMUNICATION, "waiting for what it has begun")
    if thread.state == RUNNING:
        return Wait(COMPUTING, "computing")
    return Wait(NATIVE, f"waiting in native code called by `{frame.text}`" if frame.text else "waiting in native code")
