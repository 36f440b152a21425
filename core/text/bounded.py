"""The one way by which readers open and parse files and messages of strangers: regular files alone, bytes, nesting and
numbers bounded.

A hash proves that a file is what somebody wrote, not that it makes sense. Neither torch nor Lightning is needed here.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NoReturn

from trainwright.core.errors import CheckpointError, NotAFile
from trainwright.core.text.printable import one_line, shortened
from trainwright.core.text.sizes import size_text

MOST_JSON = 256 << 20
"""Bytes of one JSON file or pickle; longer ones are neither written nor read. 100,000 tensors in 8 boxes take 50 MB."""
DEPTH = 200
"""Containers within each other; each may cost a reader a few levels of Python's stack of 1,000."""
MOST_VALUES = 10_000_000
"""Values that a tree may have if each is counted as often as it is referred to."""
_DIMENSIONS = 64  # torch's own limit
_LARGEST = 1 << 63
# Atomic, so that matching keeps nothing for each letter.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

_KINDS = (
    (stat.S_ISFIFO, "a named pipe (FIFO)"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
# What values of other kinds than expected make code raise that interprets them.
_MISUNDERSTANDINGS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


class ContentError(ValueError):
    """Bytes or values that no writer of such a file, and no sender of such a message, made."""


@contextmanager
def understood(
    where: str, advice: str = "Use another checkpoint.", problem: str = "cannot be understood"
) -> Iterator[None]:
    """Raise :class:`CheckpointError` for whatever interpreting the contents of a file raises.

    Args:
        where: the file, for the message.
        advice: what to do instead.
        problem: what is wrong with it, in general.
    """
    try:
        yield
    except CheckpointError:
        raise
    except _MISUNDERSTANDINGS as error:
        what = str(error) if isinstance(error, ContentError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{where} {problem} ({shortened(one_line(what))}). {advice}") from error


# ---- files ----------------------------------------------------------------------------------------------------------


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> BinaryIO:
    """Open a local file for reading.

    Args:
        path: of the file.
        flags: of ``os.open`` beside its own; ``os.O_NOFOLLOW`` refuses a link.

    Raises:
        NotAFile: if it is a pipe, a device or a socket, whose reading could block or never end.
        OSError: if it cannot be opened.
    """
    # Opening a pipe waits for a writer otherwise. Looking before opening would leave time to exchange the file.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | flags)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise NotAFile(
                os.fspath(path), next((text for is_kind, text in _KINDS if is_kind(mode)), "no regular file")
            )
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_at_most(file: BinaryIO, where: str, most: int = MOST_JSON) -> bytes:
    """All bytes of a file that can seek.

    Raises:
        CheckpointError: if there are more than ``most``; none is read then.
    """
    size = file.seek(0, io.SEEK_END)
    check_length(size, where, most)
    file.seek(0)
    return file.read(size)


def check_length(size: int, where: str, most: int = MOST_JSON) -> None:
    """Refuse a file of more than ``most`` bytes.

    Raises:
        CheckpointError: if it has more.
    """
    if size > most:
        raise CheckpointError(
            f"{where} has {size_text(size)}, and at most {size_text(most)} of such a file are read: no writer makes it "
            "so long. Use another checkpoint."
        )


class Limited:
    """A file of which all readings together take at most so many bytes, however many it says that it has.

    Args:
        file: can seek.
        most: bytes.
    """

    def __init__(self, file: BinaryIO, most: int = 2 * MOST_JSON) -> None:
        self._file, self._left = file, most
        self.seek: Callable[..., int] = file.seek
        self.tell: Callable[[], int] = file.tell
        self.seekable: Callable[[], bool] = file.seekable

    def read(self, size: int = -1) -> bytes:
        """Read ``size`` bytes, or those that are left."""
        if size > self._left:
            self._refuse()
        return self._counted(self._file.read(size if size >= 0 else self._left + 1))

    def readline(self) -> bytes:
        """Read to the end of a line."""
        return self._counted(self._file.readline(self._left + 1))

    def _counted(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            self._refuse()
        return data

    def _refuse(self) -> NoReturn:
        raise ContentError("what describes its contents is longer than any writer makes it")


# ---- JSON -----------------------------------------------------------------------------------------------------------


def parse_json(data: bytes, most: int = MOST_JSON, deepest: int = DEPTH) -> Any:
    """The value of a JSON document.

    Args:
        data: UTF-8.
        most: bytes that it may have.
        deepest: containers within each other that it may have.

    Raises:
        ContentError: if it is none, says something twice, or is longer or deeper.
    """
    _check_bounds(data, most, deepest)
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_once)
    except ContentError:
        raise
    except ValueError as error:
        raise ContentError(f"it is no JSON ({type(error).__name__}: {error})") from None


def json_bytes(value: Any, where: str) -> bytes:
    """``value`` as JSON that :func:`parse_json` reads.

    Raises:
        CheckpointError: if it has no form in JSON, or readers would refuse it.
    """
    try:
        data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        _check_bounds(data, MOST_JSON, DEPTH)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} cannot be written ({type(error).__name__}: {shortened(one_line(str(error)))}). Keep large or "
            "deeply nested values elsewhere, or as tensors."
        ) from error
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ContentError("it says something twice")
    return content


def _check_bounds(data: bytes, most: int, deepest: int) -> None:
    """Refuse a text that is too long or too deep before Python's parser, which recurses, sees it."""
    if len(data) > most:
        raise ContentError(f"it has {size_text(len(data))}, and at most {size_text(most)} are read")
    brackets = _STRING.sub(b"", data).translate(_ONE_KIND, _NO_BRACKETS)
    for _ in range(deepest):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")  # the innermost containers
    if b"[]" in brackets or brackets.count(b"[") > deepest:
        raise ContentError(f"it nests deeper than {deepest} levels")


# ---- values ---------------------------------------------------------------------------------------------------------


def natural(value: object) -> int:
    """``value``, which must be a whole number from 0 to 2^63 - 1.

    Raises:
        ContentError: if it is not.
    """
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ContentError(f"{shortened(repr(value))} is no number of elements, bytes, files or ranks")
    return value


def naturals(values: object) -> tuple[int, ...]:
    """A list of them: offsets, sizes, or where a box ends.

    Raises:
        ContentError: if it is none, or longer than a tensor may have dims.
    """
    if not isinstance(values, list | tuple) or len(values) > _DIMENSIONS:
        raise ContentError(f"{shortened(repr(values))} are no offsets or sizes")
    return tuple(natural(value) for value in values)


def shape_of(values: object) -> tuple[int, ...]:
    """A shape that torch can compute with.

    Raises:
        ContentError: if it is none.
    """
    shape = naturals(values)
    # Dims beside a 0 are bounded too: torch computes strides from them.
    if math.prod(length or 1 for length in shape) >= 1 << 60:
        raise ContentError(f"{shape} is no shape of a tensor")
    return shape
