"""Reading of manifests, and verification of checkpoint files against them before use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import xxhash

from trainwright.checkpoint.format.records import (
    MANIFEST,
    VERSION,
    FileRecord,
    Manifest,
    ManifestError,
    list_from_bytes,
)
from trainwright.checkpoint.store.paths import is_remote, normal_path, split_path
from trainwright.checkpoint.store.storage import Folder
from trainwright.core.errors import CheckpointError, DamagedCheckpoint

__all__ = ["MANIFEST", "VERSION", "FileRecord", "Manifest", "read_manifest", "read_whole", "records_of", "verify"]

_BLOCK = 1 << 20
_THREADS = 8


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of the checkpoint at ``path``.

    Raises:
        CheckpointError: if the folder is missing or incomplete, was written by a newer version of this package, or
            cannot be read.
        DamagedCheckpoint: if any bit of the manifest has changed.
    """
    folder = Folder(path)
    if not folder.exists():
        raise _nothing_there(folder)
    if not folder.has(MANIFEST):
        raise CheckpointError(
            f"{folder.path} has no {MANIFEST}: it was not completely written, or is not a checkpoint. Give another one."
        )
    try:
        return Manifest.from_bytes(folder.read(MANIFEST))
    except ManifestError as error:
        raise DamagedCheckpoint(folder.path, [f"{MANIFEST} (written by rank 0): {error}"]) from error
    except CheckpointError as error:
        raise error if folder.path in str(error) else CheckpointError(f"{folder.path}: {error}") from error


def read_whole(folder: Folder, record: FileRecord) -> bytes:
    """Return the contents of a file after checking its hash.

    Raises:
        DamagedCheckpoint: if they have changed.
        CheckpointError: if the file cannot be read.
    """
    data = folder.read(record.name)
    if len(data) != record.size:
        raise DamagedCheckpoint(folder.path, [_named(record, _wrong_size(len(data), record.size))])
    digest = xxhash.xxh3_128_hexdigest(data)
    if digest != record.hash:
        raise DamagedCheckpoint(folder.path, [_named(record, _changed(digest, record.hash))])
    return data


def records_of(path: str | os.PathLike[str], manifest: Manifest, name: str | None = None) -> list[FileRecord]:
    """Return the records of all files of a checkpoint, including those in its lists.

    Args:
        path: of the checkpoint.
        manifest: of it.
        name: of a list, to return only its records.

    Raises:
        DamagedCheckpoint: if a list is damaged.
    """
    folder = Folder(path, manifest)
    if name is None:
        listed = [record for each in manifest.lists for record in records_of(path, manifest, each)]
        return [*manifest.files.values(), *listed]
    record = manifest.files[name]
    try:
        found = list_from_bytes(read_whole(folder, record), manifest.token)
    except ManifestError as error:
        raise DamagedCheckpoint(folder.path, [_named(record, str(error))]) from error
    held = (len(found), sum(each.size for each in found))
    if held != tuple(manifest.lists[name]):
        problem = f"it lists {held[0]} files of {held[1]} bytes, and {MANIFEST} says {tuple(manifest.lists[name])}"
        raise DamagedCheckpoint(folder.path, [_named(record, problem)])
    return found


def verify(
    path: str | os.PathLike[str], manifest: Manifest | None = None, part: tuple[int, int] = (0, 1), deep: bool = True
) -> list[str]:
    """Check the files of a checkpoint against its manifest.

    Args:
        path: of the checkpoint.
        manifest: as read before; ``None``: read it.
        part: ``(index, count)``: check the ``index``-th of ``count`` shares of the files. With rank and world size, the
            ranks share the work; each reads only the lists of files that its share needs.
        deep: read and hash every byte; off: compare sizes only.

    Returns:
        One text per damaged file, with its name, the rank that wrote it and the problem. Files that the manifest does
        not list are ignored, as are the files of a damaged list.

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
    mine, known, unreadable = _part_of(folder, manifest, part)
    sizes = folder.sizes() if count == 1 or not manifest.lists else _sizes_of(folder, mine)
    check = partial(_problem, folder=folder, known=known, sizes=sizes, deep=deep)
    # Reading and hashing release the GIL.
    with ThreadPoolExecutor(max(1, min(_THREADS, len(mine), os.cpu_count() or 1))) as pool:
        problems = zip(mine, pool.map(check, mine), strict=True)
        found = {record.name: _named(record, problem) for record, problem in problems if problem}
    return list({**unreadable, **found}.values())


def _part_of(
    folder: Folder, manifest: Manifest, part: tuple[int, int]
) -> tuple[list[FileRecord], list[FileRecord], dict[str, str]]:
    """Return the records of a share of the files, all records read for that, and problems of unreadable lists by
    name."""
    index, count = part
    records = sorted(manifest.files.values(), key=lambda record: record.name)
    known, mine, unreadable = list(records), records[index::count], {}
    # Each share is a contiguous range of the listed files, so it needs few lists.
    total = sum(each.files for each in manifest.lists.values())
    first, last = (total * place // count for place in (index, index + 1))
    begin = 0
    for name, listed in sorted(manifest.lists.items()):
        wanted = slice(max(0, first - begin), max(0, last - begin))
        begin += listed.files
        if wanted.start >= listed.files or wanted.stop <= wanted.start:
            continue
        try:
            found = records_of(folder.path, manifest, name)
        except CheckpointError as error:
            unreadable[name] = error.problems[0] if isinstance(error, DamagedCheckpoint) else str(error)
            mine += [] if manifest.files[name] in mine else [manifest.files[name]]
        else:
            known += found
            mine += found[wanted]
    return mine, known, unreadable


def _sizes_of(folder: Folder, records: Iterable[FileRecord]) -> dict[str, int]:
    """Return the sizes of existing files by stored name, without listing the files of all ranks."""
    return {record.file: folder.size(record.name) for record in records if folder.has(record.name)}


def _problem(
    record: FileRecord, folder: Folder, known: Sequence[FileRecord], sizes: Mapping[str, int], deep: bool
) -> str | None:
    """Return the problem of a file; ``None`` if it is intact.

    Args:
        record: of the file.
        folder: of the checkpoint.
        known: records of files that it may have been swapped with.
        sizes: of the existing files.
        deep: read every byte.
    """
    size = sizes.get(record.file)
    if size is None:
        return "missing"
    if size == 0 and record.size:
        return f"empty: 0 bytes of {record.size}"
    like_size = [other for other in known if other.size == size] if deep else []
    if size != record.size and not like_size:
        return _wrong_size(size, record.size)
    if not deep:
        return None
    try:
        digest, size = _digest(folder, record)
    except CheckpointError as error:
        return str(error)
    if (digest, size) == (record.hash, record.size):
        return None
    if swapped := next((other for other in like_size if other.hash == digest), None):
        return f"holds what rank {swapped.rank} wrote as {swapped.name}: two files were swapped, or one was copied over"
    return _wrong_size(size, record.size) if size != record.size else _changed(digest, record.hash)


def _digest(folder: Folder, record: FileRecord) -> tuple[str, int]:
    """Return hash and size of the bytes read, whatever size the folder reports."""
    digest, size = xxhash.xxh3_128(), 0
    block = memoryview(bytearray(_BLOCK))
    with folder.open(record.name) as file:
        while got := file.readinto(block):  # type: ignore[attr-defined]
            digest.update(block[:got])
            size += got
    return digest.hexdigest(), size


def _named(record: FileRecord, what: str) -> str:
    stored = f", stored as {record.file}" if record.stored else ""
    return f"{record.name} (written by rank {record.rank}{stored}): {what}"


def _changed(digest: str, was: str) -> str:
    return f"changed content: its hash is {digest}, expected {was}"


def _wrong_size(size: int, expected: int) -> str:
    return f"{'truncated' if size < expected else 'too long'}: {size} bytes, expected {expected}"


def _nothing_there(folder: Folder) -> CheckpointError:
    if folder.is_file():
        return CheckpointError(f"{folder.path} is a file; a checkpoint is a folder with a {MANIFEST} in it.")
    parent, name = split_path(folder.path)
    near: list[str] = []
    with suppress(OSError):
        near = [] if is_remote(folder.path) else sorted(os.listdir(parent))
    shown = [entry for entry in near if os.path.isfile(os.path.join(parent, entry, MANIFEST)) and entry[0] != "."]
    there = f" {parent} has: {', '.join(shown[-8:])}." if shown else f" There is none in {parent}; type another path."
    return CheckpointError(f"There is no checkpoint {normal_path(folder.path)}.{there}")
