"""Checkpoints in folders of this machine.

A new one grows in a hidden folder beside its target, ``.<name>.partial-<token>``, and gets its name by one renaming.
What it replaces is swapped out in the same instant where the system can (Linux), and otherwise stands for an instant as
``.<name>.replaced-<token>``. What is being deleted is called ``.<name>.removed-<token>``, so that no half of it is ever
taken for whole. All three are in the target's folder, so no renaming crosses file systems.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from trainwright.checkpoint.format.records import MANIFEST
from trainwright.checkpoint.store.owners import TOKEN, left_behind, new_token, owner_lives
from trainwright.checkpoint.store.presence import is_folder, is_link, is_regular, is_there
from trainwright.checkpoint.store.publish import put_in_place, sync_folder
from trainwright.checkpoint.store.reading import open_named, reading
from trainwright.checkpoint.store.write_errors import ELSEWHERE
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import open_regular

_HIDDEN = re.compile(rf"\.(?P<name>.+)\.(?P<what>partial|replaced|removed)-(?P<token>{TOKEN})", re.DOTALL)
_BUFFER = 1 << 20
# How long a reader waits for a checkpoint that has no name because it is being replaced: that takes microseconds.
_LOOKS = 20
_BETWEEN_LOOKS = 0.01


class LocalFiles:
    """Files of a folder, for reading."""

    def __init__(self, path: str) -> None:
        self.path = path

    def exists(self) -> bool:
        """Whether there is a folder."""
        with reading(self.path):
            return is_folder(self.path)

    def has(self, file: str) -> bool:
        """Whether there is a file of that name in the folder."""
        with reading(self.path), contextlib.suppress(FileNotFoundError):
            return stat.S_ISREG(os.stat(os.path.join(self.path, file)).st_mode)
        return False

    def is_file(self) -> bool:
        """Whether there is a file in its place."""
        with reading(self.path):
            return is_regular(self.path)

    def open(self, file: str) -> BinaryIO:
        """A file for reading, see :func:`~trainwright.checkpoint.store.reading.open_named`."""
        path = os.path.join(self.path, file)
        return open_named(path, lambda: open_regular(path))

    def size(self, file: str) -> int:
        """Bytes of a file."""
        path = os.path.join(self.path, file)
        with reading(path):
            return os.stat(path).st_size

    def sizes(self) -> dict[str, int]:
        """Bytes of every file, by its name."""
        with reading(self.path), os.scandir(self.path) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


class LocalOutput:
    """A new file; see :class:`~trainwright.checkpoint.store.sealed.SealedOutput`."""

    def __init__(self, path: str) -> None:
        # "x": two ranks that write one file are an error of the caller, and must not become a mixture.
        self._file = io.BufferedWriter(io.FileIO(path, "xb"), _BUFFER)

    def write(self, block: memoryview) -> None:
        """Append all of ``block``."""
        self._file.write(block)

    def seal(self) -> None:
        """Bring everything to the disk, and close."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abort(self) -> None:
        """Close without caring for what was written."""
        # Closing writes what is still buffered, and fails again where writing failed.
        with contextlib.suppress(OSError, ValueError):
            self._file.raw.close()
        with contextlib.suppress(OSError, ValueError):
            self._file.close()


class LocalPending:
    """The folder in which a checkpoint grows until it is published."""

    def __init__(self, target: str, token: str) -> None:
        self.target = target
        self.token = token
        self.path = _hidden(target, "partial", token)
        self._replaced = _hidden(target, "replaced", token)
        self._removed = _hidden(target, "removed", token)

    def begin(self) -> None:
        """Make the folder. The parent's folders are made as well.

        Raises:
            OSError: if that is not possible.
            CheckpointError: if what stands at the target is no checkpoint, so that replacing it would lose it.
        """
        _refuse_what_is_no_checkpoint(self.target)
        _make_folders(os.path.dirname(self.target))
        os.mkdir(self.path)

    def stored_name(self, name: str) -> str:
        """What a file is called in the folder where that is not ``name``: here it always is."""
        return ""

    def open_new(self, file: str) -> LocalOutput:
        """A new file in the folder, which nobody sees yet."""
        return LocalOutput(os.path.join(self.path, file))

    def sizes(self, files: Sequence[str]) -> dict[str, int]:
        """Bytes of those files that are there; all others are looked at only where one is missing."""
        try:
            return {file: os.stat(os.path.join(self.path, file)).st_size for file in files}
        except OSError:  # a network file system that was asked too early keeps its answer until the folder is listed
            return LocalFiles(self.path).sizes()

    def publish(self, manifest: bytes) -> None:
        """Write the manifest, then give the folder its name in one step; replaces what has it now."""
        output = self.open_new(MANIFEST)
        try:
            output.write(memoryview(manifest))
            output.seal()
        finally:
            output.abort()
        sync_folder(self.path)
        _refuse_what_is_no_checkpoint(self.target)
        put_in_place(self.path, self.target, self._replaced)

    def clear_replaced(self) -> None:
        """Remove what the published folder replaced; may be called again when it was interrupted."""
        for path in (self._removed, self.path, self._replaced):
            _erase(path, self._removed)

    def discard(self) -> None:
        """Remove the folder. A signal may have ended :meth:`publish` anywhere, so see to what it replaced too."""
        if is_there(self._replaced) and not is_there(self.target):
            os.rename(self._replaced, self.target)
        self.clear_replaced()


def remove_local(path: str) -> None:
    """Remove a checkpoint; a link is removed alone, not what it names."""
    if is_link(path):
        os.unlink(path)
    elif not is_regular(os.path.join(path, MANIFEST)):
        raise CheckpointError(f"{path} is no checkpoint (it has no {MANIFEST}), so it was not removed.")
    else:
        _erase(path, _hidden(path, "removed", new_token()))
    sync_folder(os.path.dirname(path))


def clean_up_local(parent: str) -> list[str]:
    """See :func:`~trainwright.checkpoint.store.storage.clean_up`."""
    done = []
    for path, found in _hidden_entries(parent):
        what, target = found["what"], os.path.join(parent, found["name"])
        # First the writer, then the target: one that lives when it is looked at may publish before the target is.
        if what == "removed" or left_behind(found["token"], _idle_seconds(path)):
            if what == "replaced" and not is_there(target):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(path, target)
            else:
                _erase(path, path if what == "removed" else _hidden(target, "removed", new_token()))
            done.append(path)
    if done:
        sync_folder(parent)
    return done


def folders_in_local(parent: str) -> list[str]:
    """See :func:`~trainwright.checkpoint.store.storage.folders_in`."""
    paths: list[str] = []
    for _ in range(_LOOKS):
        paths, waiting = _look_around(parent)
        if all(owner_lives(token) is False for token in waiting.values()):
            break
        time.sleep(_BETWEEN_LOOKS)
    # The writer of what is left was killed between two renamings, or is held there. It is whole, and clean_up gives it
    # its name back.
    return sorted([*paths, *waiting])


def _look_around(parent: str) -> tuple[list[str], dict[str, str]]:
    """Visible folders, each once however many links name it; and checkpoints that are without their name while they are
    replaced, with the tokens of those who do it."""
    names: set[str] = set()
    with reading(parent), contextlib.suppress(FileNotFoundError):
        # One look for both: between two, a checkpoint could be missing from each.
        names = set(os.listdir(parent))
    hidden = [found for found in map(_HIDDEN.fullmatch, names) if found and found["what"] == "replaced"]
    waiting = {os.path.join(parent, found[0]): found["token"] for found in hidden if found["name"] not in names}
    visible = [os.path.join(parent, name) for name in names if not name.startswith(".")]
    folders = [path for path in visible if os.path.isdir(path)]
    # A folder under its own name goes before links to it.
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
    """Remove a folder or link, if it is there. It is renamed to ``removed`` first, so that nobody takes a half of it
    for whole, and so that a rank that still writes into it by name fails instead of leaving a file behind."""
    if path != removed:
        try:
            os.rename(path, removed)
        except FileNotFoundError:
            return
    if is_link(removed):
        os.unlink(removed)
    else:
        shutil.rmtree(removed, onerror=_unless_gone)


def _unless_gone(function: object, path: str, error: tuple[type[BaseException], BaseException, object]) -> None:
    # Two cleaners may meet in one folder.
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def _refuse_what_is_no_checkpoint(target: str) -> None:
    if is_link(target):
        return  # the link is replaced, not what it names
    if is_regular(target):
        raise CheckpointError(
            f"{target} is a file; a checkpoint is a folder. Give another name, remove the file, or {ELSEWHERE}."
        )
    if is_folder(target) and os.listdir(target) and not is_regular(os.path.join(target, MANIFEST)):
        raise CheckpointError(
            f"{target} is a folder that is no checkpoint (it has no {MANIFEST}) and is not empty; it would be lost. "
            f"Give another name, remove it, or {ELSEWHERE}."
        )


def _make_folders(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except FileExistsError:  # also of a folder that the disk does not show
        if not is_folder(path):
            raise


def _idle_seconds(path: str) -> float:
    """Seconds since anything in a folder changed; 0 when it is going away right now."""
    try:
        newest = os.lstat(path).st_mtime
        if not os.path.islink(path):
            with os.scandir(path) as entries:
                newest = max([newest, *(entry.stat(follow_symlinks=False).st_mtime for entry in entries)])
    except OSError:
        return 0.0
    return time.time() - newest
