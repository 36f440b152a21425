"""Atomic creation of files and folders of other tools' formats."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainwright.checkpoint.store.owners import new_token
from trainwright.checkpoint.store.presence import is_there
from trainwright.checkpoint.store.publish import put_in_place, sync_folder
from trainwright.checkpoint.store.storage import clean_up
from trainwright.core.errors import CheckpointError


@contextmanager
def atomic_path(target: Path, *, overwrite: bool, may_replace: Callable[[str], bool]) -> Iterator[Path]:
    """Yield a hidden path beside ``target`` to write a file or folder to; it is renamed to ``target`` at the end.

    On an error ``target`` is unchanged and nothing is left over.

    Args:
        target: final path.
        overwrite: replace an existing target. A folder is only replaced if ``may_replace`` allows every name in it.
        may_replace: whether a file of that name in a folder may be deleted.

    Raises:
        CheckpointError: if the target exists and may not be replaced, or cannot be written.
    """
    token = new_token()
    # Named like an unpublished checkpoint, so that `clean_up` removes it if the export is killed.
    hidden = target.with_name(f".{target.name}.partial-{token}")
    aside = target.with_name(f".{target.name}.replaced-{token}")
    try:
        _refuse_taken(target, overwrite, may_replace)
        target.parent.mkdir(parents=True, exist_ok=True)
        clean_up(str(target.parent))
        hidden.mkdir()
        yield hidden / target.name
        _flush(hidden / target.name)
        put_in_place(str(hidden / target.name), str(target), str(aside))
        _remove(aside)
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written ({type(error).__name__}: {error}); an existing one is untouched. Free "
            "space, change the permissions, or give another path."
        ) from error
    finally:
        _remove(hidden)


def _refuse_taken(target: Path, overwrite: bool, may_replace: Callable[[str], bool]) -> None:
    if not is_there(target):
        return
    if not overwrite:
        raise CheckpointError(f"{target} already exists. Give another path, or overwrite=True (--overwrite).")
    if target.is_dir():
        kept = sorted(entry.name for entry in target.iterdir() if entry.is_dir() or not may_replace(entry.name))
        if kept:
            raise CheckpointError(
                f"{target} is not overwritten, since it has other files ({', '.join(kept[:5])}), which would be lost. "
                "Give another path."
            )


def _remove(path: Path) -> None:
    """Delete a folder, file or link, ignoring errors."""
    with suppress(OSError):  # rmtree does not ignore errors of closing a folder
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def _flush(path: Path) -> None:
    """Sync a file, or a folder of files, to disk."""
    for file in path.iterdir() if path.is_dir() else (path,):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    if path.is_dir():
        sync_folder(str(path))
