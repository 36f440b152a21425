"""Checkpoints in local folders.

A checkpoint is written to a hidden folder beside its target, ``.<name>.partial-<token>``, and published by renaming it.
A replaced one is swapped out atomically where the system can (Linux), and otherwise is ``.<name>.replaced-<token>`` for
an instant. Folders being deleted are first renamed to ``.<name>.removed-<token>``, so that no partly deleted one looks
complete. All are in the target's folder, so renaming never crosses file systems.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from trainwright.checkpoint.format.records import MANIFEST
from trainwright.checkpoint.store.owners import TOKEN, is_abandoned, new_token, owner_lives
from trainwright.checkpoint.store.presence import is_folder, is_link, is_regular, is_there
from trainwright.checkpoint.store.publish import put_in_place, sync_folder
from trainwright.checkpoint.store.reading import open_named, reading
from trainwright.checkpoint.store.write_errors import ELSEWHERE
from trainwright.checkpoint.store.zip_files import open_zip
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import open_regular

_HIDDEN = re.compile(rf"\.(?P<name>.+)\.(?P<what>partial|replaced|removed)-(?P<token>{TOKEN})", re.DOTALL)
_BUFFER = 1 << 20
# Retries of a reader while a checkpoint is being replaced, which takes microseconds.
_RETRIES = 20
_RETRY_SECONDS = 0.01


class LocalFiles:
    """Files of a folder, for reading."""

    def __init__(self, path: str) -> None:
        self.path = path

    def exists(self) -> bool:
        """Return whether the folder exists."""
        with reading(self.path):
            return is_folder(self.path)

    def has(self, file: str) -> bool:
        """Return whether the folder has a file of that name."""
        with reading(self.path):
            return is_regular(os.path.join(self.path, file))

    def is_file(self) -> bool:
        """Return whether the path is a file."""
        with reading(self.path):
            return is_regular(self.path)

    def open(self, file: str) -> BinaryIO:
        """Open a file for reading, see :func:`~trainwright.checkpoint.store.reading.open_named`."""
        path = os.path.join(self.path, file)
        return open_named(path, lambda: open_regular(path))

    def size(self, file: str) -> int:
        """Return the size of a file in bytes."""
        path = os.path.join(self.path, file)
        with reading(path):
            return os.stat(path).st_size

    def sizes(self) -> dict[str, int]:
        """Return the size of every file in bytes, by name."""
        with reading(self.path), os.scandir(self.path) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


class LocalOutput:
    """A new file."""

    def __init__(self, path: str) -> None:
        # "x": two ranks must not write one file.
        self._file = io.BufferedWriter(io.FileIO(path, "xb"), _BUFFER)

    def write(self, block: memoryview) -> None:
        """Append all of ``block``."""
        self._file.write(block)

    def seal(self) -> None:
        """Sync to disk and close. Only then may a manifest list the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abort(self) -> None:
        """Close, discarding buffered data. Never raises; does nothing if already closed."""
        # Closing flushes the buffer, which fails again if writing failed.
        with contextlib.suppress(OSError, ValueError):
            self._file.raw.close()
        with contextlib.suppress(OSError, ValueError):
            self._file.close()


class LocalPending:
    """Unpublished folder of a checkpoint."""

    def __init__(self, target: str, token: str) -> None:
        self.target = target
        self.path = _hidden(target, "partial", token)
        self._replaced = _hidden(target, "replaced", token)
        self._removed = _hidden(target, "removed", token)

    def begin(self) -> None:
        """Create the folder and its parents.

        Raises:
            OSError: if it cannot be created.
            CheckpointError: if the target is not a checkpoint, so that replacing it would lose data.
        """
        _refuse_non_checkpoint(self.target)
        _make_folders(os.path.dirname(self.target))
        os.mkdir(self.path)

    def stored_name(self, name: str) -> str:
        """Return ``""``: files are stored under their own names."""
        return ""

    def open_new(self, file: str) -> LocalOutput:
        """Create a file in the folder."""
        return LocalOutput(os.path.join(self.path, file))

    def sizes(self, files: Sequence[str]) -> dict[str, int]:
        """Return the sizes of those files that exist, of all files if one is missing."""
        try:
            return {file: os.stat(os.path.join(self.path, file)).st_size for file in files}
        except OSError:  # network file systems cache a negative answer until the folder is listed
            return LocalFiles(self.path).sizes()

    def publish(self, manifest: bytes) -> None:
        """Write the manifest, then rename the folder to its target, replacing an existing one."""
        output = self.open_new(MANIFEST)
        try:
            output.write(memoryview(manifest))
            output.seal()
        finally:
            output.abort()
        sync_folder(self.path)
        _refuse_non_checkpoint(self.target)
        put_in_place(self.path, self.target, self._replaced)

    def clear_replaced(self) -> None:
        """Delete the replaced folder; may be repeated after an interruption."""
        for path in (self._removed, self.path, self._replaced):
            _erase(path, self._removed)

    def discard(self) -> None:
        """Delete the folder, and restore the target if a signal interrupted :meth:`publish`."""
        if is_there(self._replaced) and not is_there(self.target):
            os.rename(self._replaced, self.target)
        self.clear_replaced()


def remove(path: str) -> None:
    """Delete a checkpoint; of a symbolic link, only the link."""
    if is_link(path):
        os.unlink(path)
    elif not is_regular(os.path.join(path, MANIFEST)):
        raise CheckpointError(f"{path} is not a checkpoint (it has no {MANIFEST}), so it was not removed.")
    else:
        _erase(path, _hidden(path, "removed", new_token()))
    sync_folder(os.path.dirname(path))


def clean_up(parent: str) -> list[str]:
    """Clean up, see :func:`~trainwright.checkpoint.store.storage.clean_up`."""
    done = []
    for path, found in _hidden_entries(parent):
        what, target = found["what"], os.path.join(parent, found["name"])
        # The writer is checked before the target, since a live one may publish in between.
        if what == "removed" or is_abandoned(found["token"], _idle_seconds(path)):
            if what == "replaced" and not is_there(target):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(path, target)
            else:
                _erase(path, path if what == "removed" else _hidden(target, "removed", new_token()))
            done.append(path)
    if done:
        sync_folder(parent)
    return done


def folders_in(parent: str) -> list[str]:
    """List folders, see :func:`~trainwright.checkpoint.store.storage.folders_in`."""
    paths: list[str] = []
    for _ in range(_RETRIES):
        paths, waiting = _list_folders(parent)
        if all(owner_lives(token) is False for token in waiting.values()):
            break
        time.sleep(_RETRY_SECONDS)
    # Writers of the remaining ones were killed or stopped between two renamings; clean_up restores the names.
    return sorted([*paths, *waiting])


def _list_folders(parent: str) -> tuple[list[str], dict[str, str]]:
    """Return visible folders, each once despite links to it, and those renamed while being replaced, with their
    writers' tokens."""
    names: set[str] = set()
    with reading(parent), contextlib.suppress(FileNotFoundError):
        # A single listing: a checkpoint could be missing from both of two.
        names = set(os.listdir(parent))
    hidden = [found for found in map(_HIDDEN.fullmatch, names) if found and found["what"] == "replaced"]
    waiting = {os.path.join(parent, found[0]): found["token"] for found in hidden if found["name"] not in names}
    visible = [os.path.join(parent, name) for name in names if not name.startswith(".")]
    folders = [path for path in visible if os.path.isdir(path)]
    # The folder itself takes precedence over links to it.
    by_place = {os.path.realpath(path): path for path in sorted(folders, key=os.path.islink, reverse=True)}
    return sorted(by_place.values()), waiting


def _hidden_entries(parent: str) -> Iterator[tuple[str, re.Match[str]]]:
    try:
        names = sorted(os.listdir(parent))
    except FileNotFoundError:
        return
    for name in names:
        found = _HIDDEN.fullmatch(name)
        if found:
            yield os.path.join(parent, name), found


def _hidden(target: str, what: str, token: str) -> str:
    parent, name = os.path.split(target)
    return os.path.join(parent, f".{name}.{what}-{token}")


def _erase(path: str, removed: str) -> None:
    """Delete a folder, file or link if it exists.

    It is renamed to ``removed`` first, so that it never looks complete while partly deleted, and a rank that still
    writes into it fails.
    """
    if path != removed:
        try:
            os.rename(path, removed)
        except FileNotFoundError:
            return
    if is_regular(removed) or is_link(removed):
        os.unlink(removed)
    else:
        shutil.rmtree(removed, onerror=_unless_gone)


def _unless_gone(function: object, path: str, error: tuple[type[BaseException], BaseException, object]) -> None:
    # Two processes may clean up one folder.
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def _refuse_non_checkpoint(target: str) -> None:
    if is_link(target):
        return  # the link is replaced, not its target
    if is_regular(target) and not _is_run_state(target):
        raise CheckpointError(
            f"{target} is a file; a checkpoint is a folder. Give another name, remove the file, or {ELSEWHERE}."
        )
    if is_folder(target) and os.listdir(target) and not is_regular(os.path.join(target, MANIFEST)):
        raise CheckpointError(
            f"{target} is a folder that is not a checkpoint (it has no {MANIFEST}) and is not empty; it would be lost. "
            f"Give another name, remove it, or {ELSEWHERE}."
        )


def _is_run_state(file: str) -> bool:
    """Return whether a file is a checkpoint; raises if the disk fails."""
    try:
        with open_regular(file) as opened, open_zip(opened) as archive:
            return any(name.endswith(f"/{MANIFEST}") for name in archive.namelist())
    except Exception as error:  # zipfile raises arbitrary errors for other files, and hides those of the disk
        of_disk = error if isinstance(error, OSError) else error.__context__
        if isinstance(of_disk, OSError):
            raise of_disk from None
        return False


def _make_folders(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except FileExistsError:  # also raised for folders on a failing disk
        if not is_folder(path):
            raise


def _idle_seconds(path: str) -> float:
    """Return seconds since a file, or anything in a folder, changed; 0 if it is being deleted."""
    try:
        newest = os.lstat(path).st_mtime
        if is_folder(path) and not is_link(path):
            with os.scandir(path) as entries:
                newest = max([newest, *(entry.stat(follow_symlinks=False).st_mtime for entry in entries)])
    except OSError:
        return 0.0
    return time.time() - newest
