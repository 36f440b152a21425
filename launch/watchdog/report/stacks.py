"""Python stacks of a process's own threads, with the expression that each line evaluates."""

import itertools
import linecache
import os
import re
import sys
import sysconfig
import threading
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import CodeType, FrameType

from trainwright.core.processes.process import state_of

# Limits of a stack, from the innermost frame.
_MOST_FRAMES = 60
_MOST_CHARACTERS = 100
# Lightning's function; frames outside of it have called fit, validate, ...
_CALLED_TRAINER = "_call_and_handle_interrupt"
_LOCKS = ("lock", "RLock", "Lock", "Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier")
# Format of Python's faulthandler.
_ERROR = "Fatal Python error: "
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)


@dataclass(frozen=True)
class Frame:
    """One call on a stack.

    Attributes:
        file: path of the source.
        line: in it.
        function: qualified name.
        text: the evaluated expression, shortened; ``""`` = the source is missing.
        is_users: whether it is neither Python's, nor an installed package's, nor Trainwright's.
        holds_lock: whether the expression uses a lock, or an object based on one.
    """

    file: str
    line: int
    function: str
    text: str
    is_users: bool
    holds_lock: bool = False

    @property
    def place(self) -> str:
        """``function at file:line``, the file without its folders."""
        return f"{self.function} at {os.path.basename(self.file)}:{self.line}"


@dataclass(frozen=True)
class Thread:
    """One thread.

    Attributes:
        name: in Python; ``""`` = not started by Python.
        is_main: whether it is the main thread.
        state: in the kernel, see :func:`~trainwright.core.processes.process.state_of`.
        frames: innermost first.
    """

    name: str
    is_main: bool
    state: str
    frames: tuple[Frame, ...]

    @property
    def users(self) -> tuple[Frame, ...]:
        """Frames of the user's code, innermost first, without those that called the Trainer."""
        within = itertools.takewhile(lambda frame: frame.function != _CALLED_TRAINER, self.frames)
        return tuple(frame for frame in within if frame.is_users)


def own_threads() -> list[Thread]:
    """Return all threads of this process but the calling one; the main thread first."""
    known = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread()
    found = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        thread = known.get(ident)
        native = None if thread is None else thread.native_id
        state = "" if native is None else state_of(os.getpid(), native)
        found.append(Thread("" if thread is None else thread.name, thread is main, state, _frames(frame)))
    return sorted(found, key=lambda each: not each.is_main)


def raised(error: BaseException) -> Thread:
    """Return the main thread as it was when it raised ``error``."""
    frames: list[Frame] = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append(_frame(traceback.tb_frame, traceback.tb_lasti, with_values=False))
        traceback = traceback.tb_next
    return Thread("MainThread", True, "", tuple(reversed(frames[-_MOST_FRAMES:])))


def _frames(innermost: FrameType) -> tuple[Frame, ...]:
    frames: list[Frame] = []
    frame: FrameType | None = innermost
    while frame is not None and len(frames) < _MOST_FRAMES:
        # Only the innermost line is known to wait, and on what.
        frames.append(_frame(frame, frame.f_lasti, with_values=frame is innermost))
        frame = frame.f_back
    return tuple(frames)


def _frame(frame: FrameType, instruction: int, with_values: bool) -> Frame:
    code = frame.f_code
    line, text = _expression(code, instruction, frame.f_lineno)
    return Frame(
        file=code.co_filename,
        line=line,
        function=code.co_qualname,
        text=text,
        is_users=is_users(code.co_filename),
        holds_lock=with_values and _is_lock(text, frame),
    )


def _expression(code: CodeType, instruction: int, line_now: int | None) -> tuple[int, str]:
    """Return line and source text of the evaluated expression: the call rather than its whole line."""
    position = next(itertools.islice(code.co_positions(), instruction // 2, None), (None, None, None, None))
    first, last, begin, end = position
    line = first or line_now or 0
    source = linecache.getline(code.co_filename, line)
    text = source.strip()
    if source.isascii() and first == last and begin is not None and end is not None:  # columns count bytes
        text = source[begin:end]
    return line, text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."


def _is_lock(text: str, frame: FrameType) -> bool:
    """Return whether the expression uses a lock, without running any of the user's code."""
    # `with lock:` is one expression from `with` to the end of its block.
    names = text.removeprefix("with ").removesuffix(":").split("(")[0].split(".")
    if not all(name.isidentifier() for name in names):
        return False
    value = frame.f_locals.get(names[0], frame.f_globals.get(names[0]))
    for name in names[1:]:
        if type(value).__name__ in _LOCKS:
            return True
        value = getattr(value, "__dict__", {}).get(name)
    return type(value).__name__ in _LOCKS


@cache
def is_users(file: str) -> bool:
    """Return whether a source file is neither Python's, nor an installed package's, nor Trainwright's."""
    return not file.startswith(("<", *_libraries()))


@cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of code that is not the user's; recipes count as the user's."""
    paths = sysconfig.get_paths()
    installed = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own = {
        folder
        for name in ("core", "checkpoint", "strategies", "callbacks", "trainer", "launch")
        for folder in import_module(f"trainwright.{name}").__path__
    }
    others = {folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))}
    return tuple(os.path.join(folder, "") for folder in installed | own | others)


def crash_in(text: str) -> str | None:
    """Return the last crash in a text; ``None`` = there is none.

    Args:
        text: written by Python's ``faulthandler``.
    """
    begin = text.rfind(_ERROR)
    return None if begin < 0 else text[begin:].split("\nExtension modules: ")[0]


def place_of(crash: str) -> str:
    """Return the crash and the user's line: ``what (function at file:line)``; a library's line if there is none.

    Args:
        crash: of :func:`crash_in`; the main thread comes last.
    """
    what = crash.splitlines()[0].removeprefix(_ERROR)
    frames = list(_FRAME.finditer(re.split(r"\n\n", crash)[-1]))
    frame = next((frame for frame in frames if is_users(frame["file"])), frames[0] if frames else None)
    if frame is None:
        return what
    return f"{what} ({frame['function']} at {os.path.basename(frame['file'])}:{frame['line']})"
