"""Files that are hashed while they are written."""

from __future__ import annotations

from types import TracebackType

import xxhash

from trainwright.checkpoint.format.records import FileRecord
from trainwright.checkpoint.store.local_files import LocalOutput
from trainwright.checkpoint.store.remote_files import RemoteOutput
from trainwright.checkpoint.store.write_errors import write_error
from trainwright.core.errors import CheckpointError

# Bytes hashed and then written at a time, so that they are still in the CPU cache.
_BLOCK = 1 << 20


class HashedFile:
    """A new file of a checkpoint, written sequentially and hashed on the way.

    Created by ``PendingFolder.create_file``. A context manager that closes the file, or aborts on an error.

    Args:
        record: name, stored name and rank; size and hash are computed here.
        output: receives the bytes.
        path: the file, for messages.
        size: expected bytes, if known; only for messages.
    """

    def __init__(
        self, record: FileRecord, output: LocalOutput | RemoteOutput, path: str, size: int | None = None
    ) -> None:
        self._output = output
        self._path = path
        self._expected = size
        self._hash = xxhash.xxh3_128()
        self._size = 0
        self._planned = record
        self._record: FileRecord | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes without copying.

        Returns:
            The number of bytes, always all of them.

        Raises:
            CheckpointError: if writing failed. The file is then closed.
        """
        view = memoryview(data)
        if view.nbytes == 0:
            return 0
        view = view.cast("B")
        try:
            for begin in range(0, view.nbytes, _BLOCK):
                block = view[begin : begin + _BLOCK]
                self._hash.update(block)
                self._output.write(block)
        except Exception as error:
            self.abort()
            raise self._explained(error, view.nbytes) from error
        self._size += view.nbytes
        return view.nbytes

    def close(self) -> FileRecord:
        """Sync the file and return its record, the same when called again.

        Raises:
            CheckpointError: if that failed.
        """
        if self._record is None:
            try:
                self._output.seal()
            except Exception as error:
                self.abort()
                raise self._explained(error, 0) from error
            planned = self._planned
            self._record = FileRecord(planned.name, self._size, self._hash.hexdigest(), planned.rank, planned.stored)
        return self._record

    def abort(self) -> None:
        """Close the file without a record; its folder's ``discard`` deletes it."""
        self._output.abort()

    def _explained(self, error: Exception, more: int) -> CheckpointError:
        return write_error(error, self._path, max(self._expected or 0, self._size + more))

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
