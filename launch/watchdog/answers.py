"""Answers of a rank to the watchdog, independent of its main thread.

Questions come through a named pipe, so that waiting costs nothing. A daemon thread answers with a JSON file: stacks of
all threads, the last collective calls, the process groups. It cannot answer while native code holds the GIL; then a
signal makes the interpreter's C handler write the stacks.
"""

import errno
import faulthandler
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainwright.core.failures.records import write_whole
from trainwright.core.text.plain import rebuilt
from trainwright.launch.watchdog import calls
from trainwright.launch.watchdog.calls import Call, Group
from trainwright.launch.watchdog.report.stacks import Thread, own_threads, raised

# Real-time signals are free for programs; this one makes a rank write its stacks. None = the platform has none.
SIGNAL: int | None = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else None
_STOP = "stop"
# Used like the number of a question: the report of a rank whose run failed.
FAILED = "failed"


@dataclass(frozen=True)
class Answer:
    """Report of a rank about itself.

    Attributes:
        threads: the main thread first.
        calls: its last collective calls, oldest first.
        groups: by name.
        on_accelerator: whether it computes on an accelerator, which its threads do not show.
    """

    threads: tuple[Thread, ...]
    calls: tuple[Call, ...]
    groups: dict[str, Group]
    on_accelerator: bool


def own_answer(threads: list[Thread]) -> Answer:
    """Return what this process is doing."""
    try:
        made, groups = calls.own_calls(), calls.own_groups()
    except Exception:  # another format of torch's records: the stacks are useful without calls
        made, groups = [], {}
    torch: Any = sys.modules.get("torch")
    on_accelerator = torch is not None and bool(torch.cuda.is_initialized())
    return Answer(tuple(threads), tuple(made), groups, on_accelerator)


class Answerer:
    """Answers for this rank, from :meth:`start` to :meth:`stop`.

    Args:
        folder: on this machine, for questions and answers.
        box: number of this rank's box.
    """

    def __init__(self, folder: Path, box: int) -> None:
        self._folder = folder
        self._box = box
        self._pipe = folder / f"ask_{box}"
        self._stacks: Any = None
        self._enabled_faulthandler = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start answering."""
        with suppress(FileExistsError):  # left by the rank's previous process
            os.mkfifo(self._pipe, 0o600)
        # Open on both ends, so that it never reaches its end.
        descriptor = os.open(self._pipe, os.O_RDWR)
        self._stacks = stacks_file(self._folder, self._box).open("a")
        if not faulthandler.is_enabled():
            faulthandler.enable(self._stacks)  # so that the Python line of a crash in native code is known
            self._enabled_faulthandler = True
        if SIGNAL is not None:
            faulthandler.register(SIGNAL, file=self._stacks, all_threads=True, chain=False)
        self._thread = threading.Thread(
            target=self._answer, args=(descriptor,), name="trainwright-watchdog", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop answering."""
        if self._thread is None:
            return
        ask(self._folder, self._box, _STOP)
        self._thread.join(5.0)
        self._thread = None
        if SIGNAL is not None:
            # A late signal must not kill the process.
            faulthandler.unregister(SIGNAL)
            signal.signal(SIGNAL, signal.SIG_IGN)
        if self._enabled_faulthandler:
            faulthandler.disable()
        self._stacks.close()

    def record_failure(self, error: BaseException) -> None:
        """Record the state of this rank at an error, because its process may be gone when it is asked."""
        self._write(FAILED, [raised(error)])

    def _answer(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as questions:
            for question in questions:
                if question.strip() == _STOP:
                    return
                self._write(question.strip())

    def _write(self, question: str, threads: list[Thread] | None = None) -> None:
        answer = own_answer(own_threads() if threads is None else threads)
        path = answer_file(self._folder, self._box, question)
        with suppress(OSError):  # the asking process and its folder are gone
            write_whole(path, json.dumps(asdict(answer)))


def ask(folder: Path, box: int, question: str) -> bool:
    """Send a question to a rank; return whether the rank listens."""
    try:
        descriptor = os.open(folder / f"ask_{box}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT):
            return False
        raise
    try:
        os.write(descriptor, f"{question}\n".encode())
    except BlockingIOError:
        return False  # the pipe is full: the rank has not read for a long time
    finally:
        os.close(descriptor)
    return True


def read_answer(folder: Path, box: int, question: str) -> Answer | None:
    """Return and remove the answer to a question; None = there is none yet."""
    path = answer_file(folder, box, question)
    try:
        answer: Answer = rebuilt(Answer, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    path.unlink()
    return answer if answer.threads else None


def answer_file(folder: Path, box: int, question: str) -> Path:
    """Return the path of a rank's answer."""
    return folder / f"answer_{box}_{question}.json"


def stacks_file(folder: Path, box: int) -> Path:
    """Return the file for the stacks that :data:`SIGNAL` causes, of a rank and the processes forked from it."""
    return folder / f"stacks_{box}.txt"


def stacks_text(folder: Path, box: int, begin: int = 0, end: int | None = None) -> str:
    """Return the stacks of a rank and its children between two offsets of their file; ``""`` = none."""
    try:
        return stacks_file(folder, box).read_bytes()[begin:end].decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
