"""The manifest of a checkpoint: reading it, and holding the files against it before anything of them is used."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import xxhash

from trainwright.checkpoint.errors import CheckpointError, DamagedCheckpoint
from trainwright.checkpoint.paths import is_remote, normal_path, split_path
from trainwright.checkpoint.records import MANIFEST, VERSION, FileRecord, Manifest, ManifestError
from trainwright.checkpoint.storage import Folder

__all__ = ["MANIFEST", "VERSION", "FileRecord", "Manifest", "read_manifest", "verify"]

_BLOCK = 1 << 20
_THREADS = 8


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of the checkpoint at ``path``.

    Raises:
        CheckpointError: if there is no such folder, it was not completely written, a newer version of this package
            wrote it, or it cannot be read.
        DamagedCheckpoint: if any bit of the manifest has changed.
    """
    folder = Folder(path)
    if not folder.exists():
        raise _nothing_there(folder)
    if MANIFEST not in folder.sizes():
        raise CheckpointError(
            f"{folder.path} has no {MANIFEST}: it was not completely written, or is no checkpoint. Give another one."
        )
    try:
        return Manifest.from_bytes(folder.read(MANIFEST))
    except ManifestError as error:
        raise DamagedCheckpoint(folder.path, [f"{MANIFEST} (written by rank 0): {error}"]) from error
    except CheckpointError as error:
        raise error if folder.path in str(error) else CheckpointError(f"{folder.path}: {error}") from error


def verify(
    path: str | os.PathLike[str],
    manifest: Manifest | None = None,
    part: tuple[int, int] = (0, 1),
    deep: bool = True,
) -> list[str]:
    """Hold the files of a checkpoint against its manifest.

    Args:
        path: of the checkpoint.
        manifest: as read before; ``None``: read it.
        part: ``(index, count)``: look at every ``count``-th file, beginning with the ``index``-th. With a rank and the
            world size, the ranks share the work.
        deep: read and hash every byte; off: sizes only.

    Returns:
        One text for each file that is not as written, naming it, the rank that wrote it and what is wrong. Files that
        the manifest does not name are no problem.

    Raises:
        CheckpointError, DamagedCheckpoint: as :func:`read_manifest`; and if the folder cannot be listed.
    """
    index, count = part
    if not 0 <= index < count:
        raise ValueError(f"part must be (index, count) with 0 <= index < count, not {part}")
    manifest = read_manifest(path) if manifest is None else manifest
    folder = Folder(path, manifest)
    if not folder.exists():
        raise _nothing_there(folder)
    check = _Check(folder, manifest, deep)
    mine = sorted(manifest.files.values(), key=lambda record: record.name)[index::count]
    # Reading and hashing leave Python's lock to other threads.
    with ThreadPoolExecutor(max(1, min(_THREADS, len(mine), os.cpu_count() or 1))) as pool:
        return [problem for problem in pool.map(check.problem, mine) if problem]


class _Check:
    """One pass over the files of one checkpoint."""

    def __init__(self, folder: Folder, manifest: Manifest, deep: bool) -> None:
        self._folder = folder
        self._records = manifest.files.values()
        self._sizes = folder.sizes()
        self._deep = deep

    def problem(self, record: FileRecord) -> str | None:
        """What is wrong with a file; ``None``: nothing."""
        what = self._what(record)
        if what is None:
            return None
        stored = f", stored as {record.file}" if record.stored else ""
        return f"{record.name} (written by rank {record.rank}{stored}): {what}"

    def _what(self, record: FileRecord) -> str | None:
        size = self._sizes.get(record.file)
        if size is None:
            return "missing"
        if size == 0 and record.size:
            return f"empty: 0 bytes of {record.size}"
        if not self._deep:
            return None if size == record.size else _wrong_size(size, record.size)
        like_size = [other for other in self._records if other.size == size]
        if size != record.size and not like_size:
            return _wrong_size(size, record.size)
        try:
            digest, size = self._digest(record)
        except CheckpointError as error:
            return str(error)
        if (digest, size) == (record.hash, record.size):
            return None
        return _swapped(like_size, digest) or (
            _wrong_size(size, record.size)
            if size != record.size
            else f"changed content: its hash is {digest}, and was {record.hash}"
        )

    def _digest(self, record: FileRecord) -> tuple[str, int]:
        """Hash and size of what is read, whatever the folder says of its size."""
        digest, size = xxhash.xxh3_128(), 0
        block = memoryview(bytearray(_BLOCK))
        with self._folder.open(record.name) as file:
            while got := file.readinto(block):  # type: ignore[attr-defined]
                digest.update(block[:got])
                size += got
        return digest.hexdigest(), size


def _wrong_size(size: int, expected: int) -> str:
    return f"{'truncated' if size < expected else 'too long'}: {size} bytes, and had {expected}"


def _swapped(candidates: Iterable[FileRecord], digest: str) -> str | None:
    for other in candidates:
        if other.hash == digest:
            return f"holds what rank {other.rank} wrote as {other.name}: two files were swapped, or one was copied over"
    return None


def _nothing_there(folder: Folder) -> CheckpointError:
    if folder.is_file():
        return CheckpointError(f"{folder.path} is a file; a checkpoint is a folder with a {MANIFEST} in it.")
    parent, name = split_path(folder.path)
    near = [] if is_remote(folder.path) or not os.path.isdir(parent) else sorted(os.listdir(parent))
    shown = [entry for entry in near if os.path.isfile(os.path.join(parent, entry, MANIFEST)) and entry[0] != "."]
    there = f" In {parent} there are: {', '.join(shown[-8:])}." if shown else f" There is none in {parent} at all."
    return CheckpointError(f"There is no checkpoint {normal_path(folder.path)}.{there}")
