"""Folders of pretrained models."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def model_folder(given: str | os.PathLike[str], allow_download: bool = False) -> Path:
    """The folder of a model: ``given`` if it is one, else that of a model of this id on the Hugging Face Hub.

    What the Hub has comes into the cache of ``huggingface_hub`` once; files with code are not fetched.

    Args:
        given: a folder, or an id such as ``org/name``.
        allow_download: whether an id is looked up.

    Raises:
        FileNotFoundError: if there is no such folder, and an id may not be looked up.
    """
    folder = Path(given).expanduser()
    if folder.is_dir() or not allow_download:
        if not folder.is_dir():
            raise FileNotFoundError(missing_folder(str(given)))
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(given), allow_patterns=_FILES))


def offline_problem(given: str) -> tuple[Path | None, str | None]:
    """The folder of an id in the cache of the Hub while nothing may be fetched, or what to say if there is none.

    Both are ``None`` while the Hub may be asked.
    """
    from huggingface_hub import constants, snapshot_download

    if not constants.HF_HUB_OFFLINE:
        return None, None
    try:
        return Path(snapshot_download(given, local_files_only=True)), None
    except (FileNotFoundError, ValueError):
        return None, (
            f"{given}: HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} has no model of this id. Unset it to fetch "
            "the model, or give a folder that save_pretrained has written"
        )


def missing_folder(given: str) -> str:
    """What to say of a folder that is not there."""
    hint = f", or allow_download=true to fetch {given} from the Hugging Face Hub" if _ID.fullmatch(given) else ""
    return f"{given}: there is no such folder. Give one that save_pretrained has written{hint}"


def tensor_names(folder: Path) -> set[str]:
    """Names of the tensors in the safetensors files of a folder."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    return names


def covers(saved: Iterable[str], wanted: Iterable[str], prefix: str) -> bool:
    """Whether ``wanted`` names are all among ``saved`` ones, of which some may lack ``prefix``."""
    there = set(saved)
    return all(name in there or name.removeprefix(prefix) in there for name in wanted)
