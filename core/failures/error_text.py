"""Analysis of one exception: its origin, its place in the user's code, and whether it follows from another rank's
failure."""

from __future__ import annotations

import dis
import errno
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

from trainwright.core.errors import CheckpointError
from trainwright.core.problems import ChangedDataError, ConfigError, DivergedError

# Message of an error that a rank raises because another rank has ended.
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused|was)|socket|broken pipe|timed? ?out|gloo|nccl|\bstore\b|aborted|peer",
    re.IGNORECASE,
)
_LOST_PEER_KINDS = (RuntimeError, OSError, EOFError)
_TOLD = (CheckpointError, ChangedDataError, ConfigError, DivergedError)
_REFUSALS = (ValueError, TypeError, RuntimeError, ImportError, OSError)
_ENGINE = frozenset({"torch", "lightning", "lightning_fabric", "pytorch_lightning", "trainwright"})
_MOST_FRAMES = 5
_DISK = {
    errno.ENOSPC: "The disk is full: free space, or choose a folder on another one (run_dir=...)",
    errno.EDQUOT: "Your quota on the disk is used up: free space, or choose a folder on another one (run_dir=...)",
    errno.EIO: "The disk has failed: look for its errors (dmesg), or choose a folder on another one (run_dir=...)",
}


def is_refusal(error: BaseException) -> bool:
    """Return whether a `raise` of this package raised `error`, so that its message suffices and no traceback is
    needed."""
    if isinstance(error, _TOLD):
        return True
    frame, is_raise = _origin(error)
    ours = frame is not None and _package(frame) == "trainwright" and not _is_recipe(frame)
    return ours and is_raise and isinstance(error, _REFUSALS) and not is_secondary(error)


def is_secondary(error: BaseException) -> bool:
    """Return whether `error` follows from the end of another rank."""
    if not isinstance(error, _LOST_PEER_KINDS) or _LOST_PEER.search(message_of(error)) is None:
        return False
    frame, is_raise = _origin(error)
    if frame is None:
        return True
    if _module(frame).startswith("torch.utils.data"):  # workers fail and time out on their own
        return False
    return not is_raise or _package(frame) in _ENGINE and not _is_recipe(frame)


def stands_alone(error: BaseException) -> bool:
    """Return whether a `raise` outside torch raised `error` and no other error led to it.

    The end of another rank first shows in compiled code or torch.
    """
    frame, is_raise = _origin(error)
    is_first = error.__cause__ is None and error.__context__ is None
    return is_first and is_raise and frame is not None and _package(frame) != "torch"


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of `error` in the user's code, innermost last, at most five.

    Falls back to frames of libraries other than torch, Lightning and this one. Of a chain of exceptions, the first that
    has any counts.
    """
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:  # `raise error from error` makes a cycle
        seen.add(id(cause))
        found = [_summary(frame, line) for frame, line in _walk(cause) if _is_users(frame)]
        found = found or [_summary(frame, line) for frame, line in _walk(cause) if _is_foreign(frame)]
        if found:
            return found[-_MOST_FRAMES:]
        cause = cause.__cause__
    return []


def place(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of the user's code; empty if there is none."""
    frames = user_frames(error)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def own_place(error: BaseException) -> str:
    """Return `file:line` of the innermost frame outside installed libraries; empty if there is none."""
    found = [_summary(frame, line) for frame, line in _walk(error) if _is_users(frame)]
    return f"{found[-1].filename}:{found[-1].lineno}" if found else ""


def short_traceback(error: BaseException) -> str:
    """Return the user's frames of `error` as Python prints them, or else the innermost frames."""
    frames = user_frames(error) or [_summary(frame, line) for frame, line in _walk(error)][-_MOST_FRAMES:]
    return "".join(traceback.format_list(frames)).rstrip()


def message_of(error: BaseException) -> str:
    """Return the text of `error` and its notes."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r})"
    try:
        said = error.problems if isinstance(error, ConfigError) else (str(error),)
        return "\n".join([*said, *getattr(error, "__notes__", ()), *_about_disk(error)])
    except Exception as second:
        return f"(no text: __str__ of {type(error).__qualname__} raises {type(second).__name__})"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def named_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def _about_disk(error: BaseException) -> list[str]:
    advice = _DISK.get(error.errno or 0) if isinstance(error, OSError) else None
    return [] if advice is None else [f"{advice}. Type ckpt_path=last to resume from the latest checkpoint."]


def _walk(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    return traceback.walk_tb(error.__traceback__)


def _origin(error: BaseException) -> tuple[FrameType | None, bool]:
    """Return the innermost Python frame, and whether a `raise` there (not compiled code) raised the error."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return None, False
    code = last.tb_frame.f_code.co_code
    return last.tb_frame, dis.opname[code[last.tb_lasti]] == "RAISE_VARARGS"


def _summary(frame: FrameType, line: int) -> traceback.FrameSummary:
    filename = frame.f_code.co_filename
    source = linecache.getline(filename, line, frame.f_globals).strip()
    return traceback.FrameSummary(_shown(filename), line, frame.f_code.co_name, lookup_line=False, line=source)


def _shown(filename: str) -> str:
    """Return a file name relative to the working directory, if it lies below it."""
    try:
        relative = os.path.relpath(filename)
    except (ValueError, OSError):  # another drive; the working directory is gone
        return filename
    return filename if relative.startswith("..") else relative


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _package(frame: FrameType) -> str:
    return _module(frame).partition(".")[0]


def _is_recipe(frame: FrameType) -> bool:
    return _module(frame).startswith("trainwright.recipes")


def _is_foreign(frame: FrameType) -> bool:
    """Return whether a frame is of neither torch, Lightning, this package nor Python itself."""
    filename = frame.f_code.co_filename
    if filename.startswith("<") or _is_below(filename, _folders("scripts")):
        return False
    if _is_below(filename, _folders("stdlib", "platstdlib")) and not _is_below(
        filename, _folders("purelib", "platlib")
    ):
        return False
    return _package(frame) not in _ENGINE or _is_recipe(frame)


def _is_users(frame: FrameType) -> bool:
    """Return whether a frame is of neither an installed library nor Python itself."""
    return _is_foreign(frame) and not _is_below(frame.f_code.co_filename, _folders("purelib", "platlib"))


def _is_below(filename: str, folders: tuple[Path, ...]) -> bool:
    path = Path(filename)
    return any(path.is_relative_to(folder) for folder in folders)


@cache
def _folders(*names: str) -> tuple[Path, ...]:
    return tuple(Path(sysconfig.get_path(name)) for name in names)
