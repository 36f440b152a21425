"""Paths of checkpoints: local folders, or URLs of fsspec stores."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trainwright.core.errors import CheckpointError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_LOCAL_SCHEMES = ("file://", "local://")


def is_remote(path: str) -> bool:
    """Return whether ``path`` is a URL of a store (``file://`` is local)."""
    return "://" in path and not path.startswith(_LOCAL_SCHEMES)


def local_path(path: str) -> str:
    """Return the absolute local path; a symbolic link at its end is kept."""
    for scheme in _LOCAL_SCHEMES:
        path = path.removeprefix(scheme)
    return os.path.abspath(os.path.expanduser(path))


def normal_path(path: str | os.PathLike[str]) -> str:
    """Return the normal form of ``path``: absolute, or a URL, without a trailing slash."""
    text = os.fspath(path)
    if not text:
        raise CheckpointError("The path of a checkpoint is empty: give a folder, e.g. checkpoints/step_100.ckpt.")
    if not is_remote(text):
        return local_path(text)
    scheme, _, rest = text.partition("://")
    return f"{scheme}://{rest.rstrip('/')}"


def split_path(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the parent folder of ``path``, and its name."""
    path = normal_path(path)
    if not is_remote(path):
        return os.path.split(path)
    scheme, _, rest = path.partition("://")
    parent, _, name = rest.rpartition("/")
    return f"{scheme}://{parent}", name


def join_path(parent: str | os.PathLike[str], name: str) -> str:
    """Return the path of ``name`` in the folder ``parent``."""
    parent = normal_path(parent)
    if not is_remote(parent):
        return os.path.join(parent, name)
    return parent + name if parent.endswith("://") else f"{parent}/{name}"


def file_system(path: str) -> tuple[AbstractFileSystem, str]:
    """Return the fsspec file system of a URL, and the path in it.

    Raises:
        CheckpointError: if the store is unknown, or its package is not installed.
    """
    # Imported lazily: it is slow, and most runs write to local disks.
    from fsspec.core import url_to_fs

    try:
        store, root = url_to_fs(path)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be opened: {type(error).__name__}: {error}. Install the fsspec package of this store (e.g. "
            "s3fs, gcsfs, adlfs), or give a local folder."
        ) from error
    return store, str(root)
