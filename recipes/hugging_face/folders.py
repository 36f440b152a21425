"""Folders of pretrained models."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def model_folder(given: str | os.PathLike[str], allow_download: bool = False) -> Path:
    """Return the folder of a model: ``given`` if it is one, else the download of an id from the Hugging Face Hub.

    Downloads go to the cache of ``huggingface_hub``, without files with code.

    Args:
        given: a folder, or an id such as ``org/name``.
        allow_download: whether an id may be looked up.

    Raises:
        FileNotFoundError: if the folder does not exist, and an id may not be looked up.
    """
    folder = Path(given).expanduser()
    if folder.is_dir():
        return folder
    if not allow_download:
        raise FileNotFoundError(missing_folder(str(given)))
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(given), allow_patterns=_FILES))


def offline_problem(given: str) -> tuple[Path | None, str | None]:
    """Return the folder of an id in the Hub's cache while offline, or the problem if there is none.

    Both are ``None`` while online.
    """
    from huggingface_hub import constants, snapshot_download

    if not constants.HF_HUB_OFFLINE:
        return None, None
    try:
        return Path(snapshot_download(given, local_files_only=True)), None
    except (FileNotFoundError, ValueError):
        return None, (
            f"{given}: HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} does not have it. Unset it to download "
            "the model, or type a folder written by save_pretrained"
        )


def missing_folder(given: str) -> str:
    """Return the message about a missing folder."""
    hint = f", or allow_download=true to download {given} from the Hugging Face Hub" if _ID.fullmatch(given) else ""
    return f"{given}: this folder does not exist. Type one written by save_pretrained{hint}"


def tensor_names(folder: Path) -> set[str]:
    """Return the names of the tensors in the safetensors files of a folder."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    return names


def covers(saved: Iterable[str], wanted: Iterable[str], prefix: str) -> bool:
    """Return whether all ``wanted`` names are among ``saved`` ones, some of which may lack ``prefix``."""
    there = set(saved)
    return all(name in there or name.removeprefix(prefix) in there for name in wanted)
