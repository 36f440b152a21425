"""Loading of untrusted ``torch.save`` files by torch's safe reader, with additional bounds.

Nothing that a file names is imported or called; :func:`load_inert` substitutes an :class:`Inert`.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, cast

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from trainwright.checkpoint.foreign.pickle_scan import NewerPickleError, check_pickle
from trainwright.checkpoint.store.paths import file_system, is_remote, local_path, normal_path
from trainwright.checkpoint.store.write_errors import free_bytes
from trainwright.checkpoint.store.zip_files import open_zip
from trainwright.core.errors import CheckpointError, DamagedFile, MissingCheckpoint
from trainwright.core.text.bounded import MOST_JSON, ContentError, Limited, open_regular
from trainwright.core.text.printable import one_line, shortened
from trainwright.core.text.sizes import size_text

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# The format before torch 1.6: five pickles, of which the first is this number.
_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
_PICKLES = 5
_ZIP = b"PK\3\4"
_BLOCK = 1 << 20
# Most bytes that a small file may unpack to, or its tensors expand to.
_MOST_UNPACKED = 1 << 30
_MOST_NAMES = 1000
# Message of torch's safe reader that names the class or function it refuses.
_REFUSED = re.compile(r"GLOBAL (\S+) (?:was not|whose)")


class Inert:
    """Placeholder of an object of a class, or of a function's result, that was not imported.

    Attributes:
        name: module and name, such as ``deepspeed.runtime.zero.config.ZeroStageEnum``.
        args: positional arguments of its construction.
        state: its pickled state, ``None`` if there is none.
    """

    name: ClassVar[str]
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Inert:
        self = super().__new__(cls)
        self.args, self.state = args, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"<object of {self.name}, not loaded>"


class _PlainDict:
    """Factory of plain dicts: torch's safe reader sets no items of subclasses."""

    def __new__(cls, *args: Any) -> dict[Any, Any]:  # type: ignore[misc]
        return {}


_DICTS = {
    "collections.defaultdict",
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning.pytorch.utilities.parsing.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict",
}


def load_inert(path: str | os.PathLike[str]) -> Any:
    """Load a torch file without running anything in it.

    Args:
        path: a file of ``torch.save``, local or any fsspec path. Tensors of a local file are memory-mapped
            copy-on-write.

    Returns:
        The saved object. A ``defaultdict`` or ``AttributeDict`` becomes a plain dict; an object of any other class
        unknown to torch's safe reader becomes an :class:`Inert`, and the class itself a subclass of :class:`Inert`.

    Raises:
        CheckpointError: if there is no such file, it is damaged, or it is still unreadable: functions of the system,
            items in an object that is not a list or dict, or, in the format before torch 1.6, any object.
    """
    path = normal_path(path)
    with open_file(path) as file:
        return load_safely(path, file, inert=True)


def load_safely(path: str, file: BinaryIO, *, inert: bool = False, advice: str = "") -> Any:
    """Load a torch file without importing or calling anything that it names.

    Args:
        path: of the file.
        file: the same, open.
        inert: load objects of unknown classes as :class:`Inert`. Off: refuse the file.
        advice: added to the message of a refusal.

    Raises:
        CheckpointError: if it is damaged, refused, or unfolds without bound.
    """
    try:
        for each in _pickles(file):
            check_pickle(each)
        with _inert_globals(file) if inert else nullcontext():
            value = torch_load(path, file, weights_only=True)
        _check_tensors(value, _length(file))
    except NewerPickleError:
        raise _newer(path, advice) from None
    except Exception as error:
        # zipfile, pickletools and torch raise arbitrary errors: EOFError, RuntimeError, KeyError, UnpicklingError, ...
        raise _load_error(path, file, error, advice) from error
    return value


def torch_load(path: str, file: BinaryIO, *, weights_only: bool) -> Any:
    """Call ``torch.load``, memory-mapping the file where possible."""
    records = _records(file)
    # Compressed records cannot be mapped.
    stored = bool(records) and all(each.compress_type == zipfile.ZIP_STORED for each in records)
    mapped = stored and not is_remote(path)
    file.seek(0)
    return torch.load(local_path(path) if mapped else file, "cpu", weights_only=weights_only, mmap=mapped)


def _inert_globals(file: BinaryIO) -> AbstractContextManager[Any]:
    """Let torch's safe reader create an :class:`Inert` for unknown classes."""
    if not zipfile.is_zipfile(file):
        return nullcontext()
    file.seek(0)
    names = get_unsafe_globals_in_checkpoint(cast(Any, file))
    if len(names) > _MOST_NAMES:  # torch searches all of them for each object
        raise ContentError(f"it names {len(names)} classes and functions, and at most {_MOST_NAMES} are read")
    makers = [(_PlainDict if name in _DICTS else type("Inert", (Inert,), {"name": name}), name) for name in names]
    return safe_globals(cast(Any, makers))


def _load_error(path: str, file: BinaryIO, error: Exception, advice: str) -> CheckpointError:
    """Return the error for a refused or a damaged file."""
    text = str(error)
    named = _REFUSED.search(text)
    if "Unsupported operand" in text:
        return _newer(path, advice)
    if not isinstance(error, pickle.UnpicklingError):
        return DamagedFile(path, _damage(_length(file), error))
    return CheckpointError(
        f"{path} holds Python objects ({named[1] if named else shortened(one_line(text))}) that can only be rebuilt by "
        f"calling functions it names, which can run any code, so it was not loaded. {advice}Save plain numbers, "
        "strings, dicts and tensors instead of such objects."
    )


def _newer(path: str, advice: str) -> CheckpointError:
    return CheckpointError(
        f"{path} has a pickle protocol that torch's safe reader does not support (it supports 2), so it was not "
        f"loaded. {advice}Save it again with torch.save(..., pickle_protocol=2)."
    )


# ---- bounds ----------------------------------------------------------------------------------------------------------


def _damage(size: int, error: Exception) -> str:
    if size == 0:
        return "is empty: it was not completely written. Use another checkpoint"
    what = shortened(one_line(f"{error}" or type(error).__name__))
    return f"({size} bytes) is not a torch file, or damaged: {what}. Use another checkpoint"


def _length(file: BinaryIO) -> int:
    return file.seek(0, io.SEEK_END)


def _records(file: BinaryIO) -> Sequence[zipfile.ZipInfo]:
    """Return the records of a zip archive; none for other files."""
    if zipfile.is_zipfile(cast(BinaryIO, Limited(file))):
        with open_zip(file) as archive:
            return archive.infolist()
    file.seek(0)
    if file.read(len(_ZIP)) == _ZIP:
        raise ContentError("it is truncated: the zip directory at its end is missing")
    return []


def _pickles(file: BinaryIO) -> Iterator[BinaryIO]:
    """Yield each pickle of a torch file, at its beginning."""
    records = _records(file)
    if records:
        yield _pickle_among(records, file)
        return
    file.seek(0)
    if _MAGIC not in file.read(2 * len(_MAGIC)):
        raise ContentError("it does not start like a torch file")
    file.seek(0)
    yield from [cast(BinaryIO, Limited(file))] * _PICKLES


def _pickle_among(records: Sequence[zipfile.ZipInfo], file: BinaryIO) -> BinaryIO:
    names = [each.filename.lower() for each in records]
    pickles = [each for each in records if each.filename.endswith("/data.pkl")]
    if any(name.endswith("/constants.pkl") for name in names):
        raise ContentError("it is a TorchScript program (torch.jit.save), which is code")
    # torch ignores case, and which of two records it reads is unspecified.
    if len(set(names)) < len(names) or len(pickles) != 1:
        raise ContentError(f"it holds {len(pickles)} objects (data.pkl), or two records of one name")
    if sum(each.file_size for each in records if each.compress_type) > max(_MOST_UNPACKED, 20 * _length(file)):
        raise ContentError("it unpacks to far more than its size")
    if pickles[0].file_size > MOST_JSON:
        raise ContentError(f"its part data.pkl has {size_text(pickles[0].file_size)}")
    with open_zip(file) as archive:
        return io.BytesIO(archive.read(pickles[0]))


def _check_tensors(root: Any, size: int) -> None:
    """Raise for tensors that expand a small file beyond memory; the scan bounds everything else."""
    nbytes = sum(value.numel() * value.element_size() for value in values_in(root) if isinstance(value, Tensor))
    if nbytes > max(_MOST_UNPACKED, 20 * size):
        raise ContentError(f"its tensors take {size_text(nbytes)}")


def values_in(root: Any) -> Iterator[Any]:
    """Yield all values in nested containers, these included; each container and tensor once."""
    left, seen = [root], set()
    while left:
        value = left.pop()
        if isinstance(value, Tensor | dict | list | tuple | set | frozenset):
            if id(value) in seen:
                continue
            seen.add(id(value))
            if not isinstance(value, Tensor):
                left.extend([*value.keys(), *value.values()] if isinstance(value, dict) else value)
        yield value


# ---- opening ---------------------------------------------------------------------------------------------------------


def open_file(path: str) -> AbstractContextManager[BinaryIO]:
    """Open a file, local or in a store.

    Raises:
        CheckpointError: if it cannot be opened.
    """
    try:
        if not is_remote(path):
            return open_regular(local_path(path))
        system, name = file_system(path)
        if "http" in system.protocol:
            return _downloaded(path, system, name)
        return cast(AbstractContextManager[BinaryIO], system.open(name, "rb"))
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise MissingCheckpoint(f"Checkpoint file not found: {path}. Give the path of one that exists.") from error
    except IsADirectoryError as error:
        raise CheckpointError(f"{path} is a folder; give a file.") from error
    except Exception as error:
        raise CheckpointError(f"{path} cannot be opened: {type(error).__name__}: {error}.") from error


def _downloaded(path: str, system: AbstractFileSystem, name: str) -> BinaryIO:
    """Download a file completely: not every web server supports ranges, and each would cost a round trip."""
    most = (free_bytes(tempfile.gettempdir()) or 0) // 2
    size = system.info(name)["size"] or 0  # None if the server does not report it
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    if size <= most:
        with system.open(name, "rb", block_size=0, size=size or None) as source:
            while file.tell() <= most and (block := source.read(_BLOCK)):
                file.write(block)
    if max(size, file.tell()) <= most:
        file.seek(0)
        return cast(BinaryIO, file)
    file.close()
    raise CheckpointError(
        f"{path} is larger than {size_text(most)}, half of the free space in {tempfile.gettempdir()}, where downloads "
        "are stored temporarily. Set a larger folder (export TMPDIR=<folder>), or download the file."
    )
