"""Listing of the checkpoints of a folder."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from trainwright.checkpoint.format.manifest import Manifest, read_manifest
from trainwright.checkpoint.store.paths import is_remote
from trainwright.checkpoint.store.storage import folders_in
from trainwright.core.errors import CheckpointError

# Most attempts to list a folder whose checkpoints are replaced or deleted meanwhile.
_RETRIES = 100


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint with a readable manifest.

    Args:
        path: of its folder.
        step: optimizer steps done when it was written; -1 if unknown.
        created: ISO time of writing.
        manifest: of it. Its files were not checked.
    """

    path: str
    step: int
    created: str
    manifest: Manifest

    @property
    def order(self) -> tuple[int, str]:
        """Sort key, larger for newer ones."""
        return self.step, self.created


def list_checkpoints(folder: str | os.PathLike[str]) -> list[FoundCheckpoint]:
    """Return the checkpoints of a folder, newest first: by step, then by time of writing.

    Hidden folders, other folders, files, and checkpoints whose manifest is missing or damaged are ignored. A checkpoint
    with links to it counts once.

    Args:
        folder: local, or a URL that fsspec knows; need not exist.

    Raises:
        CheckpointError: if the folder cannot be listed.
    """
    for _ in range(_RETRIES):
        try:
            found = [each for path in folders_in(folder) for each in _found_at(path)]
        except _ReplacedError:
            continue
        return sorted(found, key=lambda each: each.order, reverse=True)
    raise CheckpointError(
        f"The checkpoints in {folder} are replaced faster than they can be read. Stop the run that writes them."
    )


class _ReplacedError(Exception):
    """A folder that was replaced or deleted while being read."""


def _found_at(path: str) -> list[FoundCheckpoint]:
    """Return the checkpoint in a folder; none if it is not one, or its manifest cannot be read.

    Raises:
        _ReplacedError: if the folder was replaced or deleted meanwhile.
    """
    before = _state_of(path)
    with suppress(CheckpointError):
        manifest = read_manifest(path)
        return [FoundCheckpoint(path, manifest.step, manifest.created, manifest)]
    if before is None or _state_of(path) != before:
        raise _ReplacedError
    return []


def _state_of(path: str) -> tuple[int, ...] | None:
    """Return the identity of the folder with a name; ``None``: there is none."""
    if is_remote(path):
        return ()  # object stores replace the manifest atomically
    try:
        state = os.stat(path)
    except FileNotFoundError:
        return None
    return state.st_dev, state.st_ino, state.st_ctime_ns  # inodes are reused; renaming changes the time
