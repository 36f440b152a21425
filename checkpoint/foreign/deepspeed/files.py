"""Which files a DeepSpeed checkpoint consists of, and what they hold; read without DeepSpeed, and without running
anything in them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from trainwright.checkpoint.foreign.unpickle import load_inert
from trainwright.checkpoint.store.paths import join_path, normal_path
from trainwright.checkpoint.store.storage import Folder
from trainwright.core.errors import CheckpointError

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
# Weights of a pipeline, and of experts, each in a file of its own.
_LAYER = re.compile(r"(?:layer_\d+|.*expert_\d+).*_states\.pt")
_POINTERS = ("latest", "latest_universal")
_PLAIN_NAME = re.compile(r"[^/\\\0]{1,255}")


@dataclass(frozen=True)
class Files:
    """The files of one DeepSpeed checkpoint.

    Args:
        folder: of one step, such as ``.../global_step500``.
        model: names of the files of the module, by data-parallel rank; one under the stages 1 and 2.
        optimizer: names of the files of the optimizer, by data-parallel rank.
        universal: whether it is a universal checkpoint, which has a folder per parameter.
    """

    folder: str
    model: tuple[str, ...]
    optimizer: tuple[str, ...]
    universal: bool

    def load(self, name: str) -> dict[str, Any]:
        """The dict that one file holds.

        Raises:
            CheckpointError: if it is missing, damaged, or holds no dict.
        """
        value = self.load_value(name)
        if not isinstance(value, dict):
            raise CheckpointError(
                f"{join_path(self.folder, name)} holds a {type(value).__name__}, not what DeepSpeed writes there."
            )
        return value

    def load_value(self, name: str) -> Any:
        """What one file holds.

        Raises:
            CheckpointError: if it is missing or damaged.
        """
        return load_inert(join_path(self.folder, name))

    def states_of(self, parameter: str) -> list[str]:
        """Which states of the optimizer a universal checkpoint has of a parameter.

        Raises:
            CheckpointError: if it has no folder of it.
        """
        path = join_path(self.folder, f"zero/{parameter}")
        if not _PLAIN_NAME.fullmatch(parameter) or parameter in (".", "..") or not _is_folder(path):
            raise CheckpointError(f"{self.folder} has no folder zero/{parameter}, though it names that parameter.")
        files = [name.removesuffix(".pt") for name in Folder(path).names() if name.endswith(".pt")]
        return [name for name in sorted(files) if name != "fp32"]


def is_deepspeed(path: str | os.PathLike[str]) -> bool:
    """Whether a folder, local or of any store of fsspec, looks like a checkpoint of DeepSpeed."""
    path = normal_path(path)
    names = Folder(path).names() if _is_folder(path) else []
    if any(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name) for name in names):
        return True
    return any(name in names and _is_folder(_pointed(path, name) or "") for name in _POINTERS)


def find_files(path: str | os.PathLike[str]) -> Files:
    """The files of a checkpoint.

    Args:
        path: the folder that DeepSpeed was given, in which ``latest`` names the step to read, or the folder of one
            step.

    Raises:
        CheckpointError: if there is none, files of it are missing, or it is of a kind that cannot be read.
    """
    path = normal_path(path)
    if not _is_folder(path):
        raise CheckpointError(f"There is no folder {path}.")
    folder = _folder_of_step(path)
    names = Folder(folder).names()
    _refuse_kinds(folder, names)
    model = _by_rank(folder, names, _MODEL)
    optimizer = _by_rank(folder, names, _OPTIMIZER)
    if not model:
        raise CheckpointError(f"{folder} has no file mp_rank_00_model_states.pt: it is no checkpoint of DeepSpeed.")
    return Files(folder, model, optimizer, _is_folder(join_path(folder, "zero")))


def _folder_of_step(path: str) -> str:
    names = Folder(path).names()
    for pointer in _POINTERS:
        if pointer in names:
            folder = _pointed(path, pointer)
            if folder is None or not _is_folder(folder):
                raise CheckpointError(
                    f"{join_path(path, pointer)} names a checkpoint that is not there. Give the folder of a step."
                )
            return folder
    return path


def _pointed(path: str, pointer: str) -> str | None:
    """The folder that a file names, ``None`` unless it is one in ``path``."""
    with Folder(path).open(pointer) as file:
        text = file.read(1024).decode("utf-8", "replace").strip()
    return join_path(path, text) if _PLAIN_NAME.fullmatch(text) and text not in (".", "..") else None


def _refuse_kinds(folder: str, names: Iterable[str]) -> None:
    for name in names:
        if _LAYER.fullmatch(name):
            raise CheckpointError(
                f"{folder} was written by a pipeline or by experts of DeepSpeed ({name}), whose files do not say how "
                "they make up the module. Save the whole module with DeepSpeed, e.g. save_16bit_model, and import that."
            )
        match = _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)
        if match and int(match[2]) > 0:
            raise CheckpointError(
                f"{folder} was written under tensor parallelism ({name}), and does not say how weights were cut. "
                "Save the whole module with DeepSpeed, e.g. save_16bit_model, and import that."
            )


def _by_rank(folder: str, names: Iterable[str], pattern: re.Pattern[str]) -> tuple[str, ...]:
    found: dict[int, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match:
            rank = int(match[1] or 0)
            if rank in found:
                raise CheckpointError(
                    f"{folder} has two files of rank {rank}: {found[rank]} and {name}. Remove the old."
                )
            found[rank] = name
    missing = list(islice((rank for rank in range(max(found, default=-1) + 1) if rank not in found), 10))
    if missing:
        like = found[max(found)]
        raise CheckpointError(f"{folder} has no file like {like} of the ranks {', '.join(map(str, missing))}.")
    return tuple(found[rank] for rank in sorted(found))


def _is_folder(path: str) -> bool:
    folder = Folder(path) if path else None
    return folder is not None and folder.exists() and not folder.is_file()
