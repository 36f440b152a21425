"""What the interpreter writes when native code ends a process."""

from __future__ import annotations

import os
import re

from trainwright.launch.watchdog.report.stacks import is_users

_ERROR = "Fatal Python error: "
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)


def crash_in(text: str) -> str | None:
    """The last crash that a text tells of, from its first line to its last; ``None`` = it tells of none.

    Args:
        text: what Python's ``faulthandler`` has written.
    """
    begin = text.rfind(_ERROR)
    return None if begin < 0 else text[begin:].split("\nExtension modules: ")[0]


def place_of(crash: str) -> str:
    """What crashed, and in which line of the user's: ``what (function at file:line)``; a library's if there is none.

    Args:
        crash: as :func:`crash_in` returns it; the main thread is the last one in it.
    """
    what = crash.splitlines()[0].removeprefix(_ERROR)
    frames = list(_FRAME.finditer(re.split(r"\n\n", crash)[-1]))
    frame = next((frame for frame in frames if is_users(frame["file"])), frames[0] if frames else None)
    if frame is None:
        return what
    return f"{what} ({frame['function']} at {os.path.basename(frame['file'])}:{frame['line']})"
