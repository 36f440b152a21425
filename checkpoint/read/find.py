"""The checkpoints of a folder, newest first."""

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

# Each further look is at something that was replaced or deleted during the one before.
_LOOKS = 100


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint whose manifest can be read.

    Args:
        path: of its folder.
        step: optimizer steps done when it was written; -1 if its manifest does not tell.
        created: ISO time at which it was written.
        manifest: of it. Its files were not looked at.
    """

    path: str
    step: int
    created: str
    manifest: Manifest

    @property
    def order(self) -> tuple[int, str]:
        """What newer ones have more of."""
        return self.step, self.created


def list_checkpoints(folder: str | os.PathLike[str], say: Say | None = None) -> list[FoundCheckpoint]:
    """The checkpoints of a folder, newest first: by step, then by the time of writing.

    Folders in it whose names begin with a dot are not looked at, other folders and files are nothing to it. A
    checkpoint that links name as well counts once.

    Args:
        folder: local, or a URL that fsspec knows; need not exist.
        say: is told of each checkpoint that is left out because its manifest is missing or damaged; ``None``: nobody.

    Raises:
        CheckpointError: if the folder cannot be listed.
    """
    for _ in range(_LOOKS):
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
    """A folder was replaced or deleted while it was looked at."""


def _found_at(path: str, problems: list[str]) -> list[FoundCheckpoint]:
    """The checkpoint in a folder, or none if it was never meant to be one, or its manifest cannot be read.

    Raises:
        _ReplacedError: if that is only because another folder has the name now, or none has.
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
    """What differs between folders that had a name one after the other; ``None``: no folder has it."""
    if is_remote(path):
        return ()  # a store replaces the manifest in one step
    try:
        state = os.stat(path)
    except FileNotFoundError:
        return None
    return state.st_dev, state.st_ino, state.st_ctime_ns  # a number is used again; the time changes with the name


def _is_meant_as_checkpoint(path: str) -> bool:
    """Whether a folder has a manifest, or files that only checkpoints have: one that lost its manifest is told of."""
    names = Folder(path).names()
    return MANIFEST in names or any(name.startswith("rank_") and name.endswith(".safetensors") for name in names)
