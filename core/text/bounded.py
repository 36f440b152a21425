"""Bounded reading and parsing of untrusted files and messages: regular files only; bytes, nesting and numbers limited.

A hash shows that a file is unchanged, not that it is well-formed. Imports neither torch nor Lightning.
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
"""Largest JSON file or pickle that is written or read, in bytes. 100,000 tensors in 8 boxes take 50 MB."""
DEPTH = 200
"""Deepest nesting of containers; each level may cost a reader a few frames of Python's 1,000."""
MOST_VALUES = 10_000_000
"""Most values in a tree, counting each as often as it is referenced."""
_DIMENSIONS = 64  # torch's own limit
_LARGEST = 1 << 63
# Possessive quantifiers, so that matching keeps no backtracking state per character.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

_KINDS = (
    (stat.S_ISFIFO, "a named pipe (FIFO)"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
# Errors of code that meets values of unexpected types.
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
    """Malformed bytes or values, which no writer of such a file or sender of such a message produces."""


@contextmanager
def interpreting(where: str, advice: str = "Use another checkpoint.", problem: str = "is malformed") -> Iterator[None]:
    """Convert errors of interpreting a file's contents into :class:`CheckpointError`.

    Args:
        where: the file, for the message.
        advice: what to do instead.
        problem: predicate of the message.
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
        flags: more flags for ``os.open``; ``os.O_NOFOLLOW`` refuses symbolic links.

    Raises:
        NotAFile: if it is a pipe, a device or a socket, where reading could block or never end.
        OSError: if it cannot be opened.
    """
    # O_NONBLOCK: opening a pipe must not wait for a writer. A check before opening would be a race.
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
    """Return all bytes of a seekable file.

    Raises:
        CheckpointError: if there are more than ``most``; nothing is read then.
    """
    size = file.seek(0, io.SEEK_END)
    check_length(size, where, most)
    file.seek(0)
    return file.read(size)


def check_length(size: int, where: str, most: int = MOST_JSON) -> None:
    """Raise if a file is longer than ``most`` bytes.

    Raises:
        CheckpointError: if ``size > most``.
    """
    if size > most:
        raise CheckpointError(
            f"{where} has {size_text(size)}, and at most {size_text(most)} are read. Use another checkpoint."
        )


class Limited:
    """A seekable file of which at most ``most`` bytes are read in total, whatever size it claims.

    Args:
        file: must be seekable.
        most: bytes.
    """

    def __init__(self, file: BinaryIO, most: int = 2 * MOST_JSON) -> None:
        self._file, self._left = file, most
        self.seek: Callable[..., int] = file.seek
        self.tell: Callable[[], int] = file.tell
        self.seekable: Callable[[], bool] = file.seekable

    def read(self, size: int = -1) -> bytes:
        """Read ``size`` bytes, or all that remain."""
        if size > self._left:
            self._refuse()
        return self._counted(self._file.read(size if size >= 0 else self._left + 1))

    def readline(self) -> bytes:
        """Read up to and including the next line break."""
        return self._counted(self._file.readline(self._left + 1))

    def _counted(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            self._refuse()
        return data

    def _refuse(self) -> NoReturn:
        raise ContentError("its metadata is longer than any writer makes it")


# ---- JSON -----------------------------------------------------------------------------------------------------------


def parse_json(data: bytes, most: int = MOST_JSON, deepest: int = DEPTH) -> Any:
    """Return the value of a JSON document.

    Args:
        data: UTF-8.
        most: largest size in bytes.
        deepest: most levels of nested containers.

    Raises:
        ContentError: if it is not JSON, repeats a key, or is too long or too deep.
    """
    _check_bounds(data, most, deepest)
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_once)
    except ContentError:
        raise
    except ValueError as error:
        raise ContentError(f"it is not JSON ({type(error).__name__}: {error})") from None


def json_bytes(value: Any, where: str) -> bytes:
    """Return ``value`` as JSON that :func:`parse_json` accepts.

    Raises:
        CheckpointError: if it has no JSON form, or exceeds the limits of readers.
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
        raise ContentError("it repeats a key")
    return content


def _check_bounds(data: bytes, most: int, deepest: int) -> None:
    """Raise for text that is too long or too deep before Python's recursive parser sees it."""
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
    """Return ``value`` if it is an integer from 0 to 2^63 - 1.

    Raises:
        ContentError: otherwise.
    """
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ContentError(f"{shortened(repr(value))} is not a count of elements, bytes, files or ranks")
    return value


def naturals(values: object) -> tuple[int, ...]:
    """Return a list of natural numbers (offsets or sizes) as a tuple.

    Raises:
        ContentError: if it is not such a list, or longer than a tensor may have dims.
    """
    if not isinstance(values, list | tuple) or len(values) > _DIMENSIONS:
        raise ContentError(f"{shortened(repr(values))} are not offsets or sizes")
    return tuple(natural(value) for value in values)


def shape_of(values: object) -> tuple[int, ...]:
    """Return a shape that torch can compute with.

    Raises:
        ContentError: if it is not one.
    """
    shape = naturals(values)
    # The other dims of an empty tensor are bounded too: torch computes strides from them.
    if math.prod(length or 1 for length in shape) >= 1 << 60:
        raise ContentError(f"{shape} is not a valid tensor shape")
    return shape
