"""Lightning's own door for checkpoints, ``LightningModule.load_from_checkpoint``, opened for run states.

Lightning loads by one function that its modules import by name. It is exchanged in these modules: for a folder that
holds a run state it reads that, and it never lets a file from a web server run code unless the caller says so.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpoint.read.run_state import RunState, StoredTensor, holds_run_state, map_tree
from trainwright.checkpoint.store.storage import Folder
from trainwright.core.errors import CheckpointError

# Where Lightning keeps the function: for strategies with Lightning's own CheckpointIO, and for load_from_checkpoint.
_IO = "lightning.fabric.plugins.io.torch_io"
_HOLDERS = (_IO, "lightning.pytorch.core.saving")
_OPTIMIZERS = "optimizer_states"


def teach_lightning() -> None:
    """Let Lightning's ``load_from_checkpoint`` read run states; a second call changes nothing."""
    for name in _HOLDERS:
        module: Any = importlib.import_module(name)
        if not hasattr(module.pl_load, "without_run_states"):
            module.pl_load = _with_run_states(module.pl_load, resumes=name == _IO)


def load_whole(path: str, map_location: Any = None) -> dict[str, Any]:
    """A run state as Lightning's dict with whole tensors, verified first.

    Args:
        path: its folder.
        map_location: as in ``torch.load``; tensors of a run state are of no device, so ``None`` leaves them on the CPU.

    Returns:
        The dict. States of optimizers, which would take twice the memory of the weights, are not read: a
        ``StoredTensor`` stands for each tensor, and its ``whole()`` reads it.

    Raises:
        CheckpointError: if the checkpoint cannot be used.
    """
    state = RunState.open(path)
    read: dict[str, Tensor] = {}

    def placed(value: StoredTensor | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return _placed(value, map_location)
        if value.key not in read:  # what is stored once is one tensor
            read[value.key] = _placed(value.whole(), map_location)
        return read[value.key]

    kinds = (StoredTensor, Tensor)
    return {k: value if k == _OPTIMIZERS else map_tree(value, kinds, placed) for k, value in state.tree.items()}


def _with_run_states(original: Callable[..., Any], resumes: bool) -> Callable[..., Any]:
    @wraps(original)
    def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path_or_url, str | os.PathLike):
            path = os.fspath(path_or_url)
            if holds_run_state(path):
                if not resumes or os.path.isdir(path):
                    return load_whole(path, map_location)
                RunState.open(path)  # verified; Lightning's own strategies take optimizers as torch has them
                return original(path_or_url, map_location=map_location, weights_only=True)
            _refuse_folder(path)
            if path.startswith("http") and weights_only is None:
                # Lightning's default for web addresses is False: whatever a server sends would run.
                weights_only = True
        return original(path_or_url, map_location=map_location, weights_only=weights_only)

    load.without_run_states = original  # type: ignore[attr-defined]
    return load


def _refuse_folder(path: str) -> None:
    if not path.startswith("http") and os.path.isdir(path):
        raise CheckpointError(
            f"{path} is a folder without a manifest: it was not completely written, or is no checkpoint. It holds "
            f"{', '.join(Folder(path).names()[:5]) or 'no file'}. Give another checkpoint, or a file of Lightning."
        )


def _placed(tensor: Tensor, map_location: Any) -> Tensor:
    """The tensor where ``map_location`` wants what lies on the CPU."""
    if map_location is None:
        return tensor
    if isinstance(map_location, Mapping):
        return tensor.to(map_location.get("cpu", "cpu"))
    if callable(map_location):
        storage = map_location(tensor.untyped_storage(), "cpu")
        return tensor if storage is None else tensor.to(storage.device)
    return tensor.to(torch.device(map_location))
