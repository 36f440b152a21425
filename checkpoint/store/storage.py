"""Folders of checkpoints: reading, atomic publishing, removal, and cleaning up after killed writers.

Local folders and fsspec stores (``memory://``, ``s3://``, ...) behave alike; ``local_files`` and ``remote_files``
explain how each ensures that a reader sees a complete checkpoint or none.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import BinaryIO

from trainwright.checkpoint.format.records import MANIFEST, FileRecord, Manifest, check_file_name
from trainwright.checkpoint.store import local_files, remote_files
from trainwright.checkpoint.store.hashed_file import HashedFile
from trainwright.checkpoint.store.local_files import LocalFiles, LocalPending
from trainwright.checkpoint.store.owners import is_token, new_token
from trainwright.checkpoint.store.paths import is_remote, join_path, normal_path
from trainwright.checkpoint.store.remote_files import RemoteFiles, RemotePending
from trainwright.checkpoint.store.write_errors import delete_error, write_error
from trainwright.checkpoint.store.zip_files import ZipFiles
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import open_regular, read_at_most

# Network file systems may show files of other machines late.
_PATIENCE_SECONDS = 5.0


class Folder:
    """A checkpoint's folder, for reading; or a single file, whose zip records count as files.

    Args:
        path: a local folder or file, or a URL that fsspec knows.
        manifest: its manifest. With it, files are addressed by their names in the manifest; without it, by stored
            names. They differ in stores without renaming.
    """

    def __init__(self, path: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        self.path = normal_path(path)
        self._files = _files_at(self.path)
        self._manifest = manifest

    def exists(self) -> bool:
        """Return whether the path is a folder, or a file with a run state."""
        return self._files.exists()

    def is_file(self) -> bool:
        """Return whether the path is a file."""
        return self._files.is_file()

    def has(self, name: str) -> bool:
        """Return whether there is a file of that name, without listing the folder."""
        return self._files.has(self._stored(name))

    def open(self, name: str) -> BinaryIO:
        """Open a file; reads are complete unless the file ends.

        Raises:
            CheckpointError: if it cannot be opened. Reading raises it too, always with the file's path.
        """
        return self._files.open(self._stored(name))

    def read(self, name: str) -> bytes:
        """Return the contents of a metadata file.

        Raises:
            CheckpointError: if it cannot be read, or is too long.
        """
        with self.open(name) as file:
            return read_at_most(file, join_path(self.path, name))

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            CheckpointError: if there is no such file.
        """
        return self._files.size(self._stored(name))

    def sizes(self) -> dict[str, int]:
        """Return the size of every file in bytes, by its name in the folder."""
        return self._files.sizes()

    def names(self) -> list[str]:
        """Return the names of all files in the folder."""
        return sorted(self.sizes())

    def _stored(self, name: str) -> str:
        return self._manifest.stored(name) if self._manifest else name


def _files_at(path: str) -> LocalFiles | RemoteFiles | ZipFiles:
    if not is_remote(path):
        files: LocalFiles | RemoteFiles = LocalFiles(path)
        return ZipFiles(path, partial(open_regular, path)) if files.is_file() else files
    files = RemoteFiles(path)
    # Only names with a suffix are queried in stores. HTTP servers may not support ranges.
    named_as_file = bool(os.path.splitext(path)[1]) and not path.startswith(("http://", "https://"))
    if not named_as_file or not files.is_file():
        return files
    return ZipFiles(path, partial(files.store.open, files.root, "rb"))


def is_folder(path: str) -> bool:
    """Return whether a path is a folder, local or in a store; web servers list none."""
    if path.startswith(("http://", "https://")):
        return False
    folder = Folder(path)
    return folder.exists() and not folder.is_file()


class PendingFolder:
    """A checkpoint being written, invisible until :meth:`publish`.

    One rank calls :meth:`create` and sends :attr:`token` to the others, which :meth:`join`. Each rank writes its own
    files; their records go to one rank, which publishes. A context manager that discards itself on an error.

    Args:
        target: final path of the checkpoint.
        token: identifies this save and its first process.
    """

    def __init__(self, target: str | os.PathLike[str], token: str) -> None:
        self.target = normal_path(target)
        self.token = token
        self._files = (RemotePending if is_remote(self.target) else LocalPending)(self.target, token)
        self._open: list[HashedFile] = []
        self._published = False

    @classmethod
    def create(cls, target: str | os.PathLike[str]) -> PendingFolder:
        """Start a checkpoint.

        Raises:
            CheckpointError: if the target cannot be written, or is not a checkpoint and would be lost.
        """
        pending = cls(target, new_token())
        try:
            pending._files.begin()
        except Exception as error:
            raise write_error(error, pending.target) from error
        return pending

    @classmethod
    def join(cls, target: str | os.PathLike[str], token: str) -> PendingFolder:
        """Join a checkpoint that another rank created.

        Args:
            target: the same path as there.
            token: its :attr:`token`.
        """
        if not is_token(token):
            raise CheckpointError(f"{token!r} is not a token of a checkpoint being written; pass PendingFolder.token.")
        return cls(target, token)

    def stored_name(self, name: str) -> str:
        """Return the name of a file in the folder if it differs from ``name``; else ``""``."""
        return self._files.stored_name(name)

    @property
    def token_in_names(self) -> str:
        """Token in all stored file names; ``""``: files are stored under their own names."""
        return self.token if self.stored_name(MANIFEST) else ""

    def create_file(self, name: str, rank: int, size: int | None = None) -> HashedFile:
        """Create a file of the checkpoint.

        Args:
            name: without folders; no two ranks may use one name.
            rank: global rank that writes it, for messages.
            size: its bytes, if known, for messages.

        Raises:
            CheckpointError: if it cannot be created.
        """
        check_file_name(name)
        stored = self._files.stored_name(name)
        path = join_path(self._files.path, stored or name)
        try:
            output = self._files.open_new(stored or name)
        except Exception as error:
            raise write_error(error, path, size) from error
        file = HashedFile(FileRecord(name, 0, "", rank, stored), output, path, size)
        self._open.append(file)
        return file

    def write_file(self, name: str, data: bytes, rank: int) -> FileRecord:
        """Write a whole file; see :meth:`create_file`."""
        with self.create_file(name, rank, len(data)) as file:
            file.write(data)
            return file.close()

    def publish(self, manifest: Manifest) -> None:
        """Publish the checkpoint at its target, replacing an existing one.

        Args:
            manifest: with the records of all files of all ranks, or of lists of them; the writer of a list has checked
                its files, see :meth:`check_present`.

        Raises:
            CheckpointError: if a listed file is missing, or publishing failed; the target is then unchanged.
        """
        self.check_present(list(manifest.files.values()))
        data = manifest.to_bytes()
        try:
            self._files.publish(data)
        except Exception as error:
            raise write_error(error, self.target, len(data)) from error
        self._published = True
        try:
            self._files.clear_replaced()
        except Exception as error:
            warnings.warn(f"{self.target} is written, but the replaced one could not be deleted: {error}", stacklevel=2)

    def discard(self) -> None:
        """Delete everything written so far; after :meth:`publish` the checkpoint stays. May be repeated.

        Failures are warnings, since the error that led here matters more; ``clean_up`` deletes the rest once this
        process has ended.
        """
        for file in self._open:
            file.abort()
        self._open.clear()
        try:
            # Clearing after publishing may have been interrupted.
            (self._files.clear_replaced if self._published else self._files.discard)()
        except Exception as error:
            warnings.warn(f"{self._files.path} could not be deleted: {error}", stacklevel=2)

    def check_present(self, records: Sequence[FileRecord]) -> None:
        """Check that this rank sees these files, which machines without a shared folder do not.

        Raises:
            CheckpointError: if it does not, after some seconds.
        """
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            sizes = self._files.sizes([record.file for record in records])
            wrong = [record for record in records if sizes.get(record.file) != record.size]
            if not wrong:
                return
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        shown = ", ".join(f"{r.name} of rank {r.rank} ({sizes.get(r.file, 'missing')})" for r in wrong[:8])
        raise CheckpointError(
            f"{self.target} was not published: a rank does not see the files of others: {shown}. All machines must "
            "share the folder of checkpoints; choose a shared one (checkpoint.*.dirpath=...)."
        )

    def __enter__(self) -> PendingFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            self.discard()


def folders_in(parent: str | os.PathLike[str]) -> list[str]:
    """Return paths of the visible folders in a folder; empty if it does not exist.

    Links to a folder are not listed separately. Checkpoints are listed even while being replaced.

    Raises:
        CheckpointError: if the folder cannot be listed.
    """
    parent = normal_path(parent)
    return remote_files.folders_in(parent) if is_remote(parent) else local_files.folders_in(parent)


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint; it never looks complete while partly deleted.

    Raises:
        CheckpointError: if it is not a checkpoint, or cannot be deleted.
    """
    path = normal_path(path)
    try:
        (remote_files.remove if is_remote(path) else local_files.remove)(path)
    except Exception as error:
        raise delete_error(error, path) from error


def clean_up(parent: str | os.PathLike[str]) -> list[str]:
    """Delete leftovers of killed writers in a folder of checkpoints, and restore what one was about to replace.

    Files of live processes are never touched. Writers of this machine are identified by process id and start time;
    those of other machines count as dead when their files have not changed for ten minutes. To be called by one rank;
    concurrent calls are harmless.

    Args:
        parent: folder of checkpoints; need not exist. In a store, its direct subfolders are cleaned.

    Returns:
        Paths that were deleted or restored.

    Raises:
        CheckpointError: if something cannot be deleted.
    """
    parent = normal_path(parent)
    try:
        return (remote_files.clean_up if is_remote(parent) else local_files.clean_up)(parent)
    except Exception as error:
        raise delete_error(error, parent) from error
