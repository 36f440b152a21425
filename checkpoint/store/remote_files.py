"""Checkpoints in fsspec stores: s3, gs, az, memory and others.

Objects cannot be renamed, but a put is atomic. So the files of one save have its token in their names, and putting
``manifest.json``, which lists them, publishes them. Replaced files are deleted after that.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, BinaryIO

from trainwright.checkpoint.format.records import MANIFEST, Manifest, ManifestError, with_token
from trainwright.checkpoint.store.owners import TOKEN, is_abandoned
from trainwright.checkpoint.store.paths import file_system, join_path
from trainwright.checkpoint.store.reading import open_named, reading
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import MOST_JSON, check_length

_STORED = re.compile(rf".*\.({TOKEN})(\.[^.]*)?")
_READ_ONLY = ("http", "https")


class RemoteFiles:
    """Files of a folder in a store, for reading."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.store, self.root = file_system(path)

    def exists(self) -> bool:
        """Return whether the folder, or objects under its name, exist."""
        with reading(self.path):
            # fsspec caches listings, which other processes may have changed.
            self.store.invalidate_cache(self.root)
            return bool(self.store.isdir(self.root) or self.store.exists(posixpath.join(self.root, MANIFEST)))

    def has(self, file: str) -> bool:
        """Return whether the folder has an object of that name."""
        with reading(join_path(self.path, file)):
            return bool(self.store.isfile(posixpath.join(self.root, file)))

    def is_file(self) -> bool:
        """Return whether the path is an object."""
        with reading(self.path):
            return bool(self.store.isfile(self.root))

    def open(self, file: str) -> BinaryIO:
        """Open an object for reading, see :func:`~trainwright.checkpoint.store.reading.open_named`."""
        return open_named(join_path(self.path, file), lambda: self.store.open(posixpath.join(self.root, file), "rb"))

    def size(self, file: str) -> int:
        """Return the size of an object in bytes."""
        with reading(join_path(self.path, file)):
            return int(self.store.info(posixpath.join(self.root, file))["size"])

    def sizes(self) -> dict[str, int]:
        """Return the size of every object in bytes, by name."""
        return {name: int(info["size"]) for name, info in self.entries().items() if info["type"] == "file"}

    def entries(self) -> dict[str, Mapping[str, Any]]:
        """Return the entries directly in the folder, with the store's info; empty if the folder does not exist."""
        with reading(self.path), contextlib.suppress(FileNotFoundError):
            self.store.invalidate_cache(self.root)
            listed = self.store.ls(self.root, detail=True)
            return {posixpath.basename(info["name"].rstrip("/")): info for info in listed}
        return {}

    def manifest(self) -> Manifest | None:
        """Return the manifest; ``None`` if there is none, or a malformed one.

        Raises:
            CheckpointError: if the store does not answer.
        """
        data = self.manifest_bytes()
        try:
            return None if data is None else Manifest.from_bytes(data)
        except ManifestError:
            return None

    def manifest_bytes(self) -> bytes | None:
        """Return the contents of ``manifest.json``; ``None`` if there is none.

        Raises:
            CheckpointError: if the store does not answer, or it is too long.
        """
        path = join_path(self.path, MANIFEST)
        with reading(path), contextlib.suppress(FileNotFoundError):
            data = bytes(self.store.cat_file(posixpath.join(self.root, MANIFEST), start=0, end=MOST_JSON + 1))
            check_length(len(data), path, MOST_JSON)
            return data
        return None


class RemoteOutput:
    """A new object, with the interface of :class:`~trainwright.checkpoint.store.local_files.LocalOutput`."""

    def __init__(self, store: Any, path: str) -> None:
        self._store = store
        self._path = path
        self._file = store.open(path, "wb")
        self._size = 0

    def write(self, block: bytes | memoryview) -> int:
        """Append all of ``block``; return its bytes."""
        written, size = self._file.write(block), memoryview(block).nbytes
        if written is not None and written != size:
            raise OSError(f"the store took {written} of {size} bytes")
        self._size += size
        return size

    def tell(self) -> int:
        """Return the bytes written."""
        return self._size

    def flush(self) -> None:
        """Do nothing: the store decides when it sends."""

    def seal(self) -> None:
        """Complete the object, and check its size in the store."""
        self._file.close()
        self._store.invalidate_cache(posixpath.dirname(self._path))
        size = self._store.info(self._path)["size"]
        if size != self._size:
            raise OSError(f"the store keeps {size} of {self._size} bytes")

    def abort(self) -> None:
        """Discard the object."""
        if not getattr(self._file, "closed", False):
            # Closing without discarding would complete the upload.
            with contextlib.suppress(Exception):
                self._file.discard()


class RemotePending:
    """Files of one save, invisible until a manifest lists them."""

    def __init__(self, target: str, token: str) -> None:
        scheme = target.partition("://")[0]
        if scheme in _READ_ONLY:
            raise CheckpointError(
                f"{target}: checkpoints cannot be written to {scheme}://; give a local folder, or a store such as "
                "s3://, gs:// or az://."
            )
        self.target = target
        self.token = token
        self.files = RemoteFiles(target)
        self.path = target
        self._replaced: list[str] = []

    def begin(self) -> None:
        """Create the folder."""
        if self.files.is_file():
            raise CheckpointError(f"{self.target} is a file; a checkpoint is a folder. Give another name or remove it.")
        self.files.store.makedirs(self.files.root, exist_ok=True)

    def stored_name(self, name: str) -> str:
        """Return the name of a file in the store: with the token of this save."""
        return with_token(name, self.token)

    def open_new(self, file: str) -> RemoteOutput:
        """Create an object."""
        return RemoteOutput(self.files.store, posixpath.join(self.files.root, file))

    def sizes(self, files: Sequence[str]) -> dict[str, int]:
        """Return the sizes of all objects: a listing returns a thousand per request."""
        return self.files.sizes()

    def publish(self, manifest: bytes) -> None:
        """Put the manifest. If the store reports an error but has stored it, it is published."""
        before = self.files.manifest_bytes()
        replaced = self.files.manifest()
        self._replaced = [name for name in self.files.entries() if replaced.names(name)] if replaced else []
        try:
            self._put_manifest(manifest)
        except Exception:
            now = self.files.manifest_bytes()
            if now == manifest:
                return
            if now != before:
                self._put_manifest(before)
            raise

    def clear_replaced(self) -> None:
        """Delete the replaced files; may be repeated."""
        for name in self._replaced:
            _remove_object(self.files, name)

    def discard(self) -> None:
        """Delete the files of this save, unless the manifest lists them: the store's answer may have been lost."""
        if not self._names_ours():
            for name in self.files.entries():
                if _token_of(name) == self.token:
                    _remove_object(self.files, name)

    def _put_manifest(self, data: bytes | None) -> None:
        if data is None:
            _remove_object(self.files, MANIFEST)
            return
        self.files.store.pipe_file(posixpath.join(self.files.root, MANIFEST), data)
        if self.files.manifest_bytes() != data:
            raise OSError("the store has another manifest than the one written")

    def _names_ours(self) -> bool:
        manifest = self.files.manifest()
        return manifest is not None and (
            manifest.token == self.token or any(_token_of(r.file) == self.token for r in manifest.files.values())
        )


def remove(path: str) -> None:
    """Delete a checkpoint, the manifest first."""
    files = RemoteFiles(path)
    if MANIFEST not in files.entries():
        raise CheckpointError(f"{path} is not a checkpoint (it has no {MANIFEST}), so it was not removed.")
    _remove_object(files, MANIFEST)
    with contextlib.suppress(FileNotFoundError):
        files.store.rm(files.root, recursive=True)


def folders_in(parent: str) -> list[str]:
    """List folders, see :func:`~trainwright.checkpoint.store.storage.folders_in`."""
    entries = RemoteFiles(parent).entries().items()
    return sorted(join_path(parent, n) for n, info in entries if info["type"] == "directory" and not n.startswith("."))


def clean_up(parent: str) -> list[str]:
    """Clean up, see :func:`~trainwright.checkpoint.store.storage.clean_up`."""
    done = []
    for folder, info in RemoteFiles(parent).entries().items():
        if info["type"] == "directory":
            done += _clean_up_one(RemoteFiles(join_path(parent, folder)))
    return done


def _clean_up_one(files: RemoteFiles) -> list[str]:
    entries = files.entries()
    # Order matters: listing, writers, manifest. What a writer publishes meanwhile is in the manifest, and a dead one
    # publishes nothing more.
    dead = [name for name, info in entries.items() if _is_abandoned(name, info)]
    if not dead:
        return []
    manifest = files.manifest()
    if manifest is None and MANIFEST in files.entries():
        return []  # damaged: its files are unknown
    done = [name for name in dead if manifest is None or not manifest.names(name)]
    for name in done:
        _remove_object(files, name)
    if not files.entries():
        with contextlib.suppress(Exception):
            files.store.rmdir(files.root)  # fails in stores without folders
    return [join_path(files.path, name) for name in done]


def _is_abandoned(name: str, info: Mapping[str, Any]) -> bool:
    token = _token_of(name)
    return token is not None and is_abandoned(token, _idle_seconds(info))


def _token_of(name: str) -> str | None:
    found = _STORED.fullmatch(name)
    return found[1] if found else None


def _idle_seconds(info: Mapping[str, Any]) -> float:
    """Return seconds since an object was written; 0 if unknown, so that it is kept."""
    for key in ("LastModified", "last_modified", "updated", "mtime", "modified", "created"):
        changed = info.get(key)
        if isinstance(changed, str):
            with contextlib.suppress(ValueError):
                changed = datetime.fromisoformat(changed)
        if isinstance(changed, datetime):
            changed = changed if changed.tzinfo else changed.replace(tzinfo=UTC)
            return (datetime.now(UTC) - changed).total_seconds()
        if isinstance(changed, int | float):
            return time.time() - changed
    return 0.0


def _remove_object(files: RemoteFiles, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        files.store.rm_file(posixpath.join(files.root, name))
