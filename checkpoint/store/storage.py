"""Folders of checkpoints: read, grown out of sight and published at once, removed, cleaned of what killed writers left.

Local folders and every store of fsspec (``memory://``, ``s3://``, ...) behave alike; see
``local_files`` and ``remote_files`` for how each keeps the
promise that a reader sees a whole checkpoint or none.
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
from trainwright.checkpoint.store.local_files import (
    LocalFiles,
    LocalPending,
    clean_up_local,
    folders_in_local,
    remove_local,
)
from trainwright.checkpoint.store.owners import is_token, new_token
from trainwright.checkpoint.store.paths import is_remote, join_path, normal_path
from trainwright.checkpoint.store.remote_files import (
    RemoteFiles,
    RemotePending,
    clean_up_remote,
    folders_in_remote,
    remove_remote,
)
from trainwright.checkpoint.store.sealed import SealedFile
from trainwright.checkpoint.store.write_errors import delete_error, write_error
from trainwright.checkpoint.store.zip_files import ZipFiles
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import open_regular, read_at_most

# A folder that another machine's rank wrote into may be listed late by a network file system.
_PATIENCE_SECONDS = 5.0


class Folder:
    """One checkpoint's folder, for reading; or one file, whose records are then called its files.

    Args:
        path: a folder or file of this machine, or a URL that fsspec knows.
        manifest: its manifest. With it, files are called by their names in the manifest; without it, by those in the
            folder. The two differ in stores without renaming.
    """

    def __init__(self, path: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        self.path = normal_path(path)
        self._files = _files_at(self.path)
        self._manifest = manifest

    def exists(self) -> bool:
        """Whether there is a folder at the path, or one file that holds a run state."""
        return self._files.exists()

    def is_file(self) -> bool:
        """Whether there is a file at the path."""
        return self._files.is_file()

    def has(self, name: str) -> bool:
        """Whether there is a file of that name; the others of the folder are not looked at."""
        return self._files.has(self._stored(name))

    def open(self, name: str) -> BinaryIO:
        """A file for reading; reads are whole unless the file ends.

        Raises:
            CheckpointError: if it cannot be opened. Reading raises it too, always with the file's path.
        """
        return self._files.open(self._stored(name))

    def read(self, name: str) -> bytes:
        """All bytes of a file that is not a file of tensors.

        Raises:
            CheckpointError: if it cannot be read, or is longer than such files are.
        """
        with self.open(name) as file:
            return read_at_most(file, join_path(self.path, name))

    def size(self, name: str) -> int:
        """Bytes of a file.

        Raises:
            CheckpointError: if there is no such file.
        """
        return self._files.size(self._stored(name))

    def sizes(self) -> dict[str, int]:
        """Bytes of every file, by its name in the folder."""
        return self._files.sizes()

    def names(self) -> list[str]:
        """Names of all files in the folder."""
        return sorted(self.sizes())

    def _stored(self, name: str) -> str:
        return self._manifest.stored(name) if self._manifest else name


def _files_at(path: str) -> LocalFiles | RemoteFiles | ZipFiles:
    if not is_remote(path):
        files: LocalFiles | RemoteFiles = LocalFiles(path)
        return ZipFiles(path, partial(open_regular, path)) if files.is_file() else files
    files = RemoteFiles(path)
    # A store is asked only where the name is one of a file. A web server gives no parts of files.
    named_as_file = bool(os.path.splitext(path)[1]) and not path.startswith(("http://", "https://"))
    if not named_as_file or not files.is_file():
        return files
    return ZipFiles(path, partial(files.store.open, files.root, "rb"))


class PendingFolder:
    """A checkpoint that is being written, and that nobody sees before :meth:`publish`.

    One rank calls :meth:`create` and sends :attr:`token` to the others, which :meth:`join`. Every rank writes files of
    its own; their records go to one rank, which publishes. As a context manager it discards itself on an error.

    Args:
        target: path that the checkpoint will have.
        token: names this writing and its first process.
    """

    def __init__(self, target: str | os.PathLike[str], token: str) -> None:
        self.target = normal_path(target)
        self.token = token
        self._files = (RemotePending if is_remote(self.target) else LocalPending)(self.target, token)
        self._open: list[SealedFile] = []
        self._published = False

    @classmethod
    def create(cls, target: str | os.PathLike[str]) -> PendingFolder:
        """Begin a checkpoint.

        Raises:
            CheckpointError: if nothing can be written there, or what is there is no checkpoint and would be lost.
        """
        pending = cls(target, new_token())
        try:
            pending._files.begin()
        except Exception as error:
            raise write_error(error, pending.target) from error
        return pending

    @classmethod
    def join(cls, target: str | os.PathLike[str], token: str) -> PendingFolder:
        """Take part in what another rank created.

        Args:
            target: the same path as there.
            token: its :attr:`token`.
        """
        if not is_token(token):
            raise CheckpointError(f"{token!r} is no token of a checkpoint being written; pass on PendingFolder.token.")
        return cls(target, token)

    def stored_name(self, name: str) -> str:
        """What a file is called in the folder, where that is not ``name``; ``""``: it is."""
        return self._files.stored_name(name)

    @property
    def token_in_names(self) -> str:
        """What the names of all files carry in the folder; ``""``: they are called by their names."""
        return self.token if self.stored_name(MANIFEST) else ""

    def create_file(self, name: str, rank: int, size: int | None = None) -> SealedFile:
        """A new file of the checkpoint.

        Args:
            name: without folders; no two ranks may use one name.
            rank: global rank that writes it, to be named when the file is found damaged.
            size: its bytes, if they are known; told when the disk is full.

        Raises:
            CheckpointError: if it cannot be made.
        """
        check_file_name(name)
        stored = self._files.stored_name(name)
        path = join_path(self._files.path, stored or name)
        try:
            output = self._files.open_new(stored or name)
        except Exception as error:
            raise write_error(error, path, size) from error
        file = SealedFile(FileRecord(name, 0, "", rank, stored), output, path, size)
        self._open.append(file)
        return file

    def write_file(self, name: str, data: bytes, rank: int) -> FileRecord:
        """Write a whole file; see :meth:`create_file`."""
        with self.create_file(name, rank, len(data)) as file:
            file.write(data)
            return file.close()

    def publish(self, manifest: Manifest) -> None:
        """Make the checkpoint appear at its target, in the place of what is there now.

        Args:
            manifest: with the records of all files of all ranks, or of the lists that tell of them; the files that a
                list names were looked for by who wrote it, see :meth:`check_present`.

        Raises:
            CheckpointError: if a file that it names is not there, or publishing failed; then the target is as before.
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
            warnings.warn(f"{self.target} is written, but what it replaced could not be deleted: {error}", stacklevel=2)

    def discard(self) -> None:
        """Give up: everything written so far is deleted. After :meth:`publish` the checkpoint
        stays. May be called again.

        What cannot be deleted is warned of, not raised: the error that led here matters more. ``clean_up`` deletes it
        once this process has ended.
        """
        for file in self._open:
            file.abort()
        self._open.clear()
        try:
            # Something may have ended the clearing after publishing halfway.
            (self._files.clear_replaced if self._published else self._files.discard)()
        except Exception as error:
            warnings.warn(f"{self._files.path} could not be deleted: {error}", stacklevel=2)

    def check_present(self, records: Sequence[FileRecord]) -> None:
        """This rank must see these files: ranks on machines that do not share the folder wrote theirs elsewhere.

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
            f"{self.target} was not published: a rank that looks does not see what others wrote: {shown}. All "
            "machines must share the folder of checkpoints; choose one that they share (checkpoint.*.dirpath=...)."
        )

    def __enter__(self) -> PendingFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            self.discard()


def folders_in(parent: str | os.PathLike[str]) -> list[str]:
    """Paths of the visible folders in a folder, which may hold checkpoints; empty if it does not exist.

    A folder that links name as well is in it once. A checkpoint that is just being replaced is in it at any instant.

    Raises:
        CheckpointError: if the folder cannot be listed.
    """
    parent = normal_path(parent)
    return folders_in_remote(parent) if is_remote(parent) else folders_in_local(parent)


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, so that at no instant a half of it can be taken for whole.

    Raises:
        CheckpointError: if it is no checkpoint, or cannot be removed.
    """
    path = normal_path(path)
    try:
        (remove_remote if is_remote(path) else remove_local)(path)
    except Exception as error:
        raise delete_error(error, path) from error


def clean_up(parent: str | os.PathLike[str]) -> list[str]:
    """Remove what killed writers left in a folder of checkpoints, and bring back what one was about to replace.

    What a living process is writing is never touched. A writer of this machine is looked up by its process id and start
    time; one of another machine counts as gone when nothing of its files has changed for ten minutes. To be called by
    one rank; several at once do no harm.

    Args:
        parent: the folder in which checkpoints are; need not exist. In a store, the folders directly in it are
            looked at.

    Returns:
        Paths that were removed or renamed back.

    Raises:
        CheckpointError: if something cannot be removed.
    """
    parent = normal_path(parent)
    try:
        return (clean_up_remote if is_remote(parent) else clean_up_local)(parent)
    except CheckpointError:
        raise
    except Exception as error:
        raise delete_error(error, parent) from error
