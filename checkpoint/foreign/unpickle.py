"""Torch files of classes that are not installed, or not trusted: read as data, with nothing in them run.

Tensors, containers, numbers and arrays come out as they are; everything else as an
:class:`~trainwright.checkpoint.foreign.pickle_machine.Inert` that tells its name and arguments.
"""

from __future__ import annotations

import io
import os
import struct
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch

from trainwright.checkpoint.foreign.pickle_machine import Inert, PickleMachine, UnreadablePickleError
from trainwright.checkpoint.foreign.pickle_values import BUILDERS, CONSTANTS, MAKERS, Storage, is_plain, storage_dtype
from trainwright.checkpoint.store.paths import file_system, is_remote, local_path, normal_path
from trainwright.checkpoint.store.write_errors import free_bytes
from trainwright.checkpoint.store.zip_files import RecordError, open_zip, place_of
from trainwright.core.errors import CheckpointError, DamagedFile, MissingCheckpoint
from trainwright.core.text.bounded import MOST_JSON, Limited, check_nesting, open_regular
from trainwright.core.text.sizes import size_text

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# What torch.save wrote before it wrote zip archives begins with this number and this version, each a pickle.
_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION = 1001
_ZIP = b"PK\3\4"
_BLOCK = 1 << 20
_MOST_UNPACKED = 1 << 30
_BYTE_ORDER = {"little": b"little", "big": b"big"}[sys.byteorder]


def load_inert(path: str | os.PathLike[str]) -> Any:
    """What a torch file holds, with nothing in it run.

    Args:
        path: a file of ``torch.save``, its present zip format or the one before; local or any fsspec path. Tensors of a
            local zip file are mapped from disk, so their values are read when they are used, and writing to them does
            not change the file.

    Returns:
        The saved object. Parameters are plain tensors; a ``Namespace``, ``defaultdict``, ``Counter`` or
        ``AttributeDict`` is a plain dict; what else a file names or calls is an
        :class:`~trainwright.checkpoint.foreign.pickle_machine.Inert`. Python attributes of tensors are dropped.

    Raises:
        CheckpointError: if there is no such file, or it is damaged or no torch file.
    """
    path = normal_path(path)
    with open_file(path) as file:
        return read_inert(path, file)


def names_in(path: str, file: BinaryIO) -> set[str]:
    """The classes and functions that a torch file names and that make no plain value.

    Nothing is made of what it names, so this is what to ask before another reader takes the file: a few bytes of nested
    pairs that share their halves would keep that one busy for ever.

    Args:
        path: of the file.
        file: the same, open.

    Raises:
        CheckpointError: if it is damaged or no torch file, or its values nest without bound.
    """
    machine = PickleMachine({}, {}, {}, Inert)
    with _damage_named(path, file):
        pickle = _pickle_in(file) if _is_zip(file) else _after_head(file)
        check_nesting(machine.load(pickle), (dict, list, tuple, set, frozenset, Inert), _inside)
    return {name for name in machine.names if not is_plain(name)}


def _pickle_in(file: BinaryIO) -> BinaryIO:
    """The pickle of a zip archive, which may be compressed here."""
    size = file.seek(0, io.SEEK_END)
    with open_zip(file) as archive:
        records = archive.infolist()
        if sum(each.file_size for each in records if each.compress_type) > max(_MOST_UNPACKED, 20 * size):
            raise UnreadablePickleError("it unpacks to far more than its size")
        pickle = next((each for each in records if each.filename.endswith("/data.pkl")), None)
        if pickle is None or pickle.file_size > MOST_JSON:
            raise UnreadablePickleError("its part data.pkl is missing or too long")
        return io.BytesIO(archive.read(pickle))


def _inside(value: Any) -> Iterable[Any]:
    """The values in a container, also in what a call would have been given."""
    if isinstance(value, Inert):
        state = value.args, value.kwargs, value.state, value.items, value.entries
        return [each for each in state if each]
    return [*value.keys(), *value.values()] if isinstance(value, dict) else value


def open_file(path: str) -> AbstractContextManager[BinaryIO]:
    """A file for reading, local or of any store.

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
        raise CheckpointError(f"{path} is a folder; a file is expected here.") from error
    except Exception as error:
        raise CheckpointError(f"{path} cannot be opened: {type(error).__name__}: {error}.") from error


def _downloaded(path: str, system: AbstractFileSystem, name: str) -> BinaryIO:
    """A file of a web server, whole: not every one answers for a part of a file, and each would cost a round trip."""
    most = (free_bytes(tempfile.gettempdir()) or 0) // 2
    size = system.info(name)["size"] or 0  # None where the server does not say
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
        f"{path} is longer than {size_text(most)}, half of what is free in {tempfile.gettempdir()}, where files of web "
        "servers are kept while they are read. Name a larger folder (export TMPDIR=<folder>), or download the file."
    )


def _machine(persistent: Callable[[Any], Any] | None) -> PickleMachine:
    return PickleMachine(CONSTANTS, MAKERS, BUILDERS, persistent)


def read_inert(path: str, file: BinaryIO) -> Any:
    """As :func:`load_inert`, from a file that is open."""
    with _damage_named(path, file):
        value = _load_zip(path, file) if _is_zip(file) else _load_legacy(file)
        # What an Inert holds is looked at by nobody who goes through values.
        check_nesting(value, (dict, list, tuple, set, frozenset), _inside)
        return value


@contextmanager
def _damage_named(path: str, file: BinaryIO) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged file makes zipfile, struct and torch raise anything
        raise DamagedFile(path, _what_is_wrong(file.seek(0, io.SEEK_END), error)) from error


def _is_zip(file: BinaryIO) -> bool:
    if zipfile.is_zipfile(cast(BinaryIO, Limited(file))):
        return True
    file.seek(0)
    if file.read(len(_ZIP)) == _ZIP:
        raise UnreadablePickleError("its end is missing, where the list of its contents stands")
    return False


def _what_is_wrong(size: int, error: Exception) -> str:
    if size == 0:
        return "is empty: it was never written to its end. Use another checkpoint"
    return f"({size} bytes) is no torch file, or a damaged one: {error}. Use another checkpoint"


# ---- zip archives ----------------------------------------------------------------------------------------------------


class _Archive:
    """A zip archive of ``torch.save``.

    Args:
        path: of the file; a local one is mapped into memory.
        file: the same, open.
    """

    def __init__(self, path: str, file: BinaryIO) -> None:
        self._zip = open_zip(file)
        self._file = file
        self._size = file.seek(0, io.SEEK_END)
        self._mapped = None if is_remote(path) else torch.UntypedStorage.from_file(local_path(path), False, self._size)
        pickles = [name for name in self._zip.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise UnreadablePickleError(
                f"it holds {len(pickles)} objects (data.pkl) where there is one in a torch file"
            )
        self._root = pickles[0].removesuffix("data.pkl")
        if f"{self._root}constants.pkl" in self._zip.NameToInfo:
            raise UnreadablePickleError("it is a TorchScript program (torch.jit.save), which is code")
        if f"{self._root}byteorder" in self._zip.NameToInfo and self.read("byteorder") != _BYTE_ORDER:
            raise UnreadablePickleError("it was written on a machine of the other byte order")

    def read(self, name: str) -> bytes:
        """Content of a small entry, checked by its checksum."""
        self._place(name)
        return self._zip.read(self._root + name)

    def storage(self, name: str) -> torch.UntypedStorage:
        """Bytes of an entry, mapped where the file is local."""
        start, size = self._place(name)
        if self._mapped is not None and start % 16 == 0:
            return cast(torch.UntypedStorage, self._mapped[start : start + size])
        self._file.seek(start)
        return _filled(self._file, size)

    def _place(self, name: str) -> tuple[int, int]:
        """Where the bytes of an entry begin and how many they are."""
        try:
            info = self._zip.getinfo(self._root + name)
        except KeyError:
            raise UnreadablePickleError(f"its part {name} is missing") from None
        try:
            return place_of(self._file, info, self._size)
        except RecordError as error:
            raise UnreadablePickleError(f"its part {name} {error}") from None


def _load_zip(path: str, file: BinaryIO) -> Any:
    archive = _Archive(path, file)
    storages: dict[str, Storage] = {}

    def persistent(identity: Any) -> Storage:
        mark, kind, key, _, count = identity
        dtype = storage_dtype(kind)
        if mark != "storage" or not isinstance(key, str):
            raise UnreadablePickleError(f"a reference to {identity}")
        if key not in storages:
            data = archive.storage(f"data/{key}") if count else torch.UntypedStorage(0)
            storages[key] = Storage(data, dtype)
        found = Storage(storages[key].data, dtype)
        if found.data.nbytes() != count * dtype.itemsize:
            raise UnreadablePickleError(f"its part data/{key} has {found.data.nbytes()} bytes for {count} of {dtype}")
        return found

    return _machine(persistent).load(io.BytesIO(archive.read("data.pkl")))


# ---- before zip archives ---------------------------------------------------------------------------------------------


def _after_head(file: BinaryIO) -> BinaryIO:
    """The file at the pickle of what was saved."""
    file.seek(0)
    pickle = cast(BinaryIO, Limited(file))
    head = _machine(None).load(pickle)
    if head != _MAGIC or _machine(None).load(pickle) != _LEGACY_VERSION:
        raise UnreadablePickleError("it does not begin as torch files do")
    if _machine(None).load(pickle).get("little_endian") != (sys.byteorder == "little"):
        raise UnreadablePickleError("it was written on a machine of the other byte order")
    return pickle


def _load_legacy(file: BinaryIO) -> Any:
    size = file.seek(0, io.SEEK_END)
    pickle = _after_head(file)
    storages: dict[str, Storage] = {}

    def persistent(identity: Any) -> Storage:
        mark, kind, key, _, count, part = identity
        dtype = storage_dtype(kind)
        if mark != "storage" or not isinstance(key, str) or not 0 <= count * dtype.itemsize <= size:
            raise UnreadablePickleError(f"a reference to {identity}")
        if key not in storages:
            storages[key] = Storage(torch.UntypedStorage(count * dtype.itemsize), dtype)
        data = storages[key].data
        if part is not None:
            _, start, length = part
            data = data[start * dtype.itemsize : (start + length) * dtype.itemsize]
        return Storage(data, dtype)

    value = _machine(persistent).load(pickle)
    for key in _machine(None).load(pickle):
        storage = storages[key]
        (count,) = struct.unpack("<q", file.read(8))
        if count * storage.dtype.itemsize != storage.data.nbytes():
            raise UnreadablePickleError(f"its part {key} has {count} values of {storage.dtype}")
        _fill(storage.data, file)
    return value


def _filled(file: BinaryIO, size: int) -> torch.UntypedStorage:
    data = torch.UntypedStorage(size)
    _fill(data, file)
    return data


def _fill(data: torch.UntypedStorage, file: BinaryIO) -> None:
    """Read the next bytes of a file into all of ``data``."""
    if not data.nbytes():
        return
    values: Any = torch.empty(0, dtype=torch.uint8).set_(data).numpy()
    target = memoryview(values)
    while len(target):
        block = file.read(min(len(target), 1 << 24))
        if not block:
            raise UnreadablePickleError(f"it ends {len(target)} bytes early")
        target[: len(block)] = block
        target = target[len(block) :]
