"""Evidence about one rank that may hang, and the cause of its wait as its stack shows it."""

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.core.processes.process import IN_KERNEL, RUNNING, STOPPED, TRACED
from trainwright.launch.watchdog.answers import Answer
from trainwright.launch.watchdog.boxes import Progress
from trainwright.launch.watchdog.calls import Call
from trainwright.launch.watchdog.report.stacks import Frame, Thread

COMMUNICATION, TORCH, DATA, LOCK, QUEUE, THREAD = "communication", "torch", "data", "lock", "queue", "thread"
PROCESS, NETWORK, SLEEP, COMPUTING = "process", "network", "sleep", "computing"
NATIVE, DEBUGGER, COMPILING = "native", "debugger", "compiling"
# Kinds of waits that no stack shows.
HALTED, KERNEL, SILENT = "halted", "kernel", "silent"

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


@dataclass(frozen=True)
class Child:
    """A process started by the rank, such as a data loader worker.

    Attributes:
        process: its id.
        name: that it has set.
        state: in the kernel.
        stacks: written by Python's C handler; ``""`` = none.
    """

    process: int
    name: str
    state: str
    stacks: str = ""


@dataclass(frozen=True)
class Evidence:
    """Evidence about one rank.

    Attributes:
        progress: its box.
        stalled: seconds since its last change.
        limit: time limit of its phase in seconds.
        slow_limit: time limit in seconds of work that is known to be slow.
        answer: its report; ``None`` = it did not answer.
        asked: whether it listened to questions, as it does only within its run.
        state: of its process.
        stacks: written by Python's C handler for a rank that did not answer; ``""`` = none.
        children: collected while it waits for data.
        halted: whether a signal has kept its process stopped for too long.
    """

    progress: Progress
    stalled: float
    limit: float
    slow_limit: float
    answer: Answer | None = None
    asked: bool = True
    state: str = ""
    stacks: str = ""
    children: tuple[Child, ...] = ()
    halted: bool = False

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.progress.rank

    @property
    def thread(self) -> Thread | None:
        """The thread that does the rank's work."""
        return None if self.answer is None else acting_thread(self.answer.threads)

    @property
    def wait(self) -> Wait:
        """The cause of its wait."""
        if self.state == STOPPED:
            return Wait(HALTED, "stopped by a signal (SIGSTOP)")
        if self.answer is None and self.state == TRACED:
            return Wait(DEBUGGER, "held by a debugger")
        if self.answer is None and self.state == IN_KERNEL:
            return Wait(KERNEL, "waiting in the kernel (state D: a disk or driver that does not answer)")
        if not self.asked:
            return Wait(NATIVE, "outside of its run, where it cannot be asked")
        if self.answer is None:
            return Wait(SILENT, "in native code that does not let go of Python's lock (GIL)")
        return self._wait_of_thread(self.answer)

    @property
    def pending(self) -> tuple[Call, ...]:
        """Its collective calls that are not complete, oldest first."""
        return () if self.answer is None else tuple(call for call in self.answer.calls if call.pending)

    @property
    def exceeds_limit(self) -> bool:
        """Whether it has exceeded its limit."""
        kind = self.wait.kind
        if kind == HALTED:
            return self.progress.running and self.halted
        return self.progress.running and self.stalled > (self.slow_limit if kind == COMPILING else self.limit)

    @property
    def place(self) -> Frame | None:
        """The innermost line of the user's code, or of a library's if there is none."""
        thread = self.thread
        if thread is None or not thread.frames:
            return None
        return thread.users[0] if thread.users else thread.frames[0]

    def _wait_of_thread(self, answer: Answer) -> Wait:
        thread = acting_thread(answer.threads)
        wait = wait_of(thread)
        for_others = Wait(COMMUNICATION, "waiting for other ranks")
        if self.pending and (
            # torch waits below Python: autograd for the gradients that DDP sends, or for results of the accelerator.
            (wait.kind == TORCH and thread.state != "R")
            or (answer.on_accelerator and wait.kind in (TORCH, COMPUTING, NATIVE))
        ):
            return for_others
        if wait.kind == TORCH and thread.state != "R":
            return Wait(NATIVE, "waiting in native code")
        return wait
