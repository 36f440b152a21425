"""Records of a zip archive, read like files of a folder.

``torch.save`` writes a zip archive of uncompressed records. A run state in one file (``state_file``) has its manifest
and JSON as further records, so readers of folders can read it too.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import BinaryIO, cast

from trainwright.checkpoint.format.records import MANIFEST, STATE, TENSORS
from trainwright.checkpoint.store.reading import open_named
from trainwright.core.errors import CheckpointError, DamagedCheckpoint
from trainwright.core.text.bounded import Limited

_OURS = {MANIFEST, STATE, TENSORS}
_MARK = b"PK\3\4"
_LOCAL_HEADER = struct.Struct("<4s22xHH")


def open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """Open an archive, reading a bounded amount of metadata."""
    return zipfile.ZipFile(cast(BinaryIO, Limited(file)))


class ZipFiles:
    """Records of an archive, for reading. The record ``archive/data/0`` is the file ``data.0``.

    Args:
        path: of the archive, for messages.
        open: opens it.
    """

    def __init__(self, path: str, open: Callable[[], BinaryIO]) -> None:
        self.path = path
        self._open = open

    @cached_property
    def _records(self) -> Mapping[str, zipfile.ZipInfo]:
        try:
            with self._open() as file, open_zip(file) as archive:
                records = archive.infolist()
        except Exception:  # zipfile raises arbitrary errors for damaged files
            return {}  # the reader of the file reports the damage
        return {info.filename.partition("/")[2].replace("/", "."): info for info in records}

    def exists(self) -> bool:
        """Return whether the archive holds a run state, or remains of one."""
        return not _OURS.isdisjoint(self._records)

    def is_file(self) -> bool:
        """Return True: an archive is a file."""
        return True

    def has(self, file: str) -> bool:
        """Return whether there is a record of that name."""
        return file in self._records

    def open(self, file: str) -> BinaryIO:
        """Open a record for reading, see :func:`~trainwright.checkpoint.store.reading.open_named`.

        Raises:
            CheckpointError: if there is none of that name.
            DamagedCheckpoint: if its bytes are not intact.
        """
        return open_named(f"{self.path}:{file}", lambda: self._window(file))

    def size(self, file: str) -> int:
        """Return the bytes of a record."""
        return self._info(file).file_size

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every record, by its name."""
        return {name: info.file_size for name, info in self._records.items()}

    def _info(self, file: str) -> zipfile.ZipInfo:
        if file not in self._records:
            raise CheckpointError(f"{self.path}:{file}: this record is missing.")
        return self._records[file]

    def _window(self, file: str) -> _Window:
        info = self._info(file)
        archive = self._open()
        try:
            return _Window(archive, self._start(file, info, archive), info.file_size)
        except BaseException:
            archive.close()
            raise

    def _start(self, file: str, info: zipfile.ZipInfo, archive: BinaryIO) -> int:
        """Return the position of a record's bytes in the archive."""
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise DamagedCheckpoint(self.path, [f"{file} is compressed or encrypted, which torch does not support"])
        size = archive.seek(0, io.SEEK_END)
        archive.seek(info.header_offset)
        header = archive.read(_LOCAL_HEADER.size).ljust(_LOCAL_HEADER.size)
        mark, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        start: int = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if mark != _MARK or start + info.file_size > size:
            raise DamagedCheckpoint(self.path, [f"{file} is cut short"])
        return start


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read into ``buffer`` within the part."""
        wanted = min(len(buffer), self._size - self._at)
        if wanted <= 0:
            return 0
        self._file.seek(self._start + self._at)
        got: int = self._file.readinto(memoryview(buffer)[:wanted])  # type: ignore[attr-defined]
        self._at += got
        return got

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move within the part."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        """Return the position within the part."""
        return self._at

    def close(self) -> None:
        """Close the file as well."""
        self._file.close()
        super().close()
