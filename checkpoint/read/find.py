"""Listing of the checkpoints of a folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from trainwright.checkpoint.format.manifest import Manifest, read_manifest
from trainwright.checkpoint.format.records import MANIFEST
from trainwright.checkpoint.store.paths import is_remote
from trainwright.checkpoint.store.storage import Folder, folders_in
from trainwright.core.errors import CheckpointError

Say = Callable[[str], object]

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


def list_checkpoints(folder: str | os.PathLike[str], say: Say | None = None) -> list[FoundCheckpoint]:
    """Return the checkpoints of a folder, newest first: by step, then by time of writing.

    Hidden folders, other folders and files are ignored. A checkpoint with links to it counts once.

    Args:
        folder: local, or a URL that fsspec knows; need not exist.
        say: called with a message for each checkpoint whose manifest is missing or damaged; ``None``: not reported.

    Raises:
        CheckpointError: if the folder cannot be listed.
    """
    for _ in range(_RETRIES):
        problems: list[str] = []
        try:
            found = [each for path in folders_in(folder) for each in _found_at(path, problems)]
        except _ReplacedError:
            continue
        if say is not None:
            for problem in problems:
                say(problem)
        return sorted(found, key=lambda each: each.order, reverse=True)
    raise CheckpointError(
        f"The checkpoints in {folder} are replaced faster than they can be read. Try again, or stop the run that "
        "writes them."
    )


class _ReplacedError(Exception):
    """A folder that was replaced or deleted while being read."""


def _found_at(path: str, problems: list[str]) -> list[FoundCheckpoint]:
    """Return the checkpoint in a folder; none if it is not one, or its manifest cannot be read.

    Raises:
        _ReplacedError: if the folder was replaced or deleted meanwhile.
    """
    before, own = _state_of(path), list[str]()
    try:
        if _is_meant_as_checkpoint(path):
            manifest = read_manifest(path)
            return [FoundCheckpoint(path, manifest.step, manifest.created, manifest)]
    except CheckpointError as error:
        own = [str(error)]
    if before is None or _state_of(path) != before:
        raise _ReplacedError
    problems += own
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


def _is_meant_as_checkpoint(path: str) -> bool:
    """Return whether a folder has a manifest, or tensor files that indicate a lost one."""
    names = Folder(path).names()
    return MANIFEST in names or any(name.startswith("rank_") and name.endswith(".safetensors") for name in names)
