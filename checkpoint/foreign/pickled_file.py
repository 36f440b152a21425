"""Loading of checkpoint files of Lightning and ``torch.save``, and folders of ``torch.distributed.checkpoint``.

These contain pickles, which can run code when loaded. Nothing in them runs unless the caller trusts the file, wherever
it comes from; files that cannot be read safely are refused.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from trainwright.checkpoint.foreign.unpickle import load_safely, open_file, torch_load
from trainwright.checkpoint.format.manifest import MANIFEST
from trainwright.checkpoint.store.paths import is_remote, local_path, normal_path
from trainwright.checkpoint.store.storage import Folder, is_folder
from trainwright.core.errors import CheckpointError
from trainwright.core.text.printable import one_line, shortened

# DCP would warn at every load that one process reads alone.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

TRUST = (
    "If, and only if, you trust its author, load it by typing trust=true on the command line, or "
    "weights_only=False in Python."
)
"""Advice on how to load a file that may run code."""

_DCP_METADATA = ".metadata"
# File that Lightning's FSDP and ModelParallel strategies save beside DCP's, and their keys of the module's weights.
_LIGHTNING_METADATA = "meta.pt"
_LIGHTNING_WEIGHTS = ("model", "state_dict")
_LIGHTNING_OPTIMIZER = re.compile(r"optimizer_(\d+)")


def load_pickled(path: str | os.PathLike[str], *, trust: bool = False) -> dict[str, Any]:
    """Load the dict in a file of Lightning or ``torch.save``.

    Args:
        path: a file, local or any fsspec path, including ``http(s)://``. Tensors of local files are memory-mapped. With
            ``trust`` also a local folder of ``torch.distributed.checkpoint``.
        trust: let the file run code while loading, like ``weights_only=False`` of ``torch.load``. Off by default.

    Returns:
        The saved dict. For a folder: its values nested as saved, with those that Lightning saved beside them.

    Raises:
        CheckpointError: if there is no such path, it is damaged, is not a dict, or holds objects that need code to be
            rebuilt while ``trust`` is off.
    """
    path = normal_path(path)
    if is_folder(path):
        return _load_folder(path, trust)
    with open_file(path) as file:
        value = _load_file(path, file, trust)
    if not isinstance(value, dict):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise CheckpointError(
            f"{path} holds a {kind}, not a checkpoint: give a file that holds a dict, such as those of "
            "Trainer.save_checkpoint or torch.save(module.state_dict(), path)."
        )
    return value


def _load_file(path: str, file: BinaryIO, trust: bool) -> Any:
    if not trust:
        return load_safely(path, file, advice=f"{TRUST} Better: ")
    try:
        return torch_load(path, file, weights_only=False)
    except Exception as error:
        # torch raises arbitrary errors (EOFError, RuntimeError, KeyError, ...), and so may the file's code.
        raise CheckpointError(
            f"{path} could not be loaded: {type(error).__name__}: {shortened(one_line(str(error)))}. It is damaged, "
            "not a torch file, or its code fails here. Use another checkpoint."
        ) from error


# ---- folders ---------------------------------------------------------------------------------------------------------


def _load_folder(path: str, trust: bool) -> dict[str, Any]:
    names = Folder(path).names()
    if MANIFEST in names:
        raise CheckpointError(f"{path} is a run state, not a file of Lightning: give it as ckpt_path unchanged.")
    if _DCP_METADATA not in names:
        raise CheckpointError(
            f"{path} is a folder without a {MANIFEST}: not a checkpoint, or an incomplete one. Give another "
            "checkpoint, or a file."
        )
    if not trust:
        raise CheckpointError(
            f"{path} is a folder of torch.distributed.checkpoint: its {_DCP_METADATA} is a pickle, which can run any "
            f"code, so it was not loaded. {TRUST}"
        )
    if is_remote(path):
        raise CheckpointError(f"{path}: such folders must be local. Download it first.")
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        return _with_lightning_metadata(Path(local_path(path)), _read_dcp(path))
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{path} could not be loaded: {type(error).__name__}: {error}") from error


def _read_dcp(path: str) -> dict[str, Any]:
    """Read a DCP folder in one process, nested as saved."""
    # Imported here: it takes a fifth of what a rank imports of this package and for it.
    from torch.distributed.checkpoint import FileSystemReader, load

    from trainwright.core.torch_internals import _EmptyStateDictLoadPlanner

    reader, planner = FileSystemReader(path), _EmptyStateDictLoadPlanner()
    reader.read_metadata()  # raises a short error if it is damaged; that of load() has a stack
    load({}, storage_reader=reader, planner=planner, no_dist=True)
    values: dict[str, Any] = planner.original_state_dict
    return values


def _with_lightning_metadata(folder: Path, tree: dict[str, Any]) -> dict[str, Any]:
    if not (folder / _LIGHTNING_METADATA).is_file():
        return tree
    beside = torch.load(folder / _LIGHTNING_METADATA, "cpu", weights_only=False)
    weights: dict[str, Any] = next((tree.pop(name) for name in _LIGHTNING_WEIGHTS if name in tree), {})
    optimizers = sorted(filter(_LIGHTNING_OPTIMIZER.fullmatch, tree), key=lambda name: int(name.rpartition("_")[2]))
    states = [tree.pop(name) for name in optimizers]
    return {**cast(dict[str, Any], beside), **tree, "state_dict": weights, "optimizer_states": states}
