"""The checkpoints of a folder, and the newest of them that is whole."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainwright.checkpoint.errors import CheckpointError, DamagedCheckpoint
from trainwright.checkpoint.manifest import Manifest, read_manifest, verify
from trainwright.checkpoint.records import MANIFEST
from trainwright.checkpoint.storage import Folder, folders_in

Say = Callable[[str], object]

_TRIES = 5
_INSTANT = 0.02


@dataclass(frozen=True)
class Found:
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


def list_checkpoints(folder: str | os.PathLike[str], say: Say | None = None) -> list[Found]:
    """The checkpoints of a folder, newest first: by step, then by the time of writing.

    Folders in it whose names begin with a dot are not looked at, other folders and files are nothing to it. A
    checkpoint that links name as well counts once.

    Args:
        folder: local, or a URL that fsspec knows; need not exist.
        say: is told of each checkpoint that is left out because its manifest is missing or damaged; ``None``: nobody.

    Raises:
        CheckpointError: if the folder cannot be listed.
    """
    found = []
    for path in folders_in(folder):
        try:
            found += _found_at(path)
        except CheckpointError as error:
            if say is not None:
                say(str(error))
    return sorted(found, key=lambda each: each.order, reverse=True)


def newest_good(folder: str | os.PathLike[str], deep: bool = True, say: Say | None = None) -> Found | None:
    """The newest checkpoint of a folder whose files are all as they were written; ``None`` if there is none.

    Args:
        folder: as for :func:`list_checkpoints`.
        deep: read and hash every file; off: look at sizes only.
        say: is told why each newer one, and each without a manifest to read, was passed over; ``None``: nobody.

    Raises:
        CheckpointError: if the folder cannot be listed.
    """
    good = None
    reasons: list[str] = []
    for _ in range(_TRIES):
        reasons.clear()
        found = list_checkpoints(folder, reasons.append)
        good = _first_good(found, deep, reasons)
        # What is replaced or deleted while it is read looks damaged: then something new is there to be looked at.
        if good is not None or list_checkpoints(folder) == found:
            break
    if say is not None:
        for reason in reasons:
            say(reason)
    return good


def _first_good(newest_first: Sequence[Found], deep: bool, reasons: list[str]) -> Found | None:
    for found in newest_first:
        try:
            problems = verify(found.path, found.manifest, deep=deep)
        except CheckpointError as error:
            problems = [str(error)]
        if not problems:
            return found
        reasons.append(f"The checkpoint {found.path} of step {found.step} was passed over: {'; '.join(problems)}")
    return None


def _found_at(path: str) -> list[Found]:
    """The checkpoint in a folder, or none if it was never meant to be one."""
    try:
        manifest = read_manifest(path) if _is_meant_as_checkpoint(path) else None
    except DamagedCheckpoint:
        raise
    except CheckpointError:
        # Where two names cannot be exchanged, one that is replaced has none for an instant.
        time.sleep(_INSTANT)
        manifest = read_manifest(path)
    return [] if manifest is None else [Found(path, manifest.step, manifest.created, manifest)]


def _is_meant_as_checkpoint(path: str) -> bool:
    """Whether a folder has a manifest, or files that only checkpoints have: one that lost its manifest is told of."""
    names = Folder(path).names()
    return MANIFEST in names or any(name.startswith("rank_") and name.endswith(".safetensors") for name in names)
