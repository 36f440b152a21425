"""Support of run states in Lightning's ``load_from_checkpoint``.

Patches Lightning's loading function in the modules that import it: run states are read, and files from a web server
cannot execute code unless the caller allows it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from trainwright.checkpoint.foreign.state_file import with_objects
from trainwright.checkpoint.read.run_state import RunState, StoredTensor, holds_run_state, map_tree
from trainwright.checkpoint.store.storage import Folder
from trainwright.core.errors import CheckpointError
from trainwright.strategies.state.collector import LEFT_OUT

# Modules that import the function: for strategies with Lightning's CheckpointIO, and for load_from_checkpoint.
_IO = "lightning.fabric.plugins.io.torch_io"
_HOLDERS = (_IO, "lightning.pytorch.core.saving")
_OPTIMIZERS = "optimizer_states"


def patch_lightning() -> None:
    """Make Lightning's ``load_from_checkpoint`` read run states; idempotent."""
    for name in _HOLDERS:
        module: Any = importlib.import_module(name)
        if not hasattr(module.pl_load, "without_run_states"):
            module.pl_load = _with_run_states(module.pl_load, resumes=name == _IO)
            if name != _IO:
                module._load_state = _naming_defaults(module._load_state)


def load_whole(path: str, map_location: Any = None) -> dict[str, Any]:
    """Verify a run state and return it as Lightning's checkpoint dict with whole tensors.

    Args:
        path: its folder.
        map_location: as in ``torch.load``; ``None``: CPU.

    Returns:
        The dict. Optimizer states, with twice the memory of the weights, are not read: each tensor is a
        ``StoredTensor`` to be read with its ``whole()``.

    Raises:
        CheckpointError: if the checkpoint is invalid, or hooks have added objects, which only its pickle holds.
    """
    state = RunState.open(path)
    read: dict[str, Tensor] = {}

    def placed(value: StoredTensor | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return _placed(value, map_location)
        if value.key not in read:  # tied tensors are stored once
            read[value.key] = _placed(value.whole(), map_location)
        return read[value.key]

    kinds = (StoredTensor, Tensor)
    tree = with_objects(state)
    return {k: value if k == _OPTIMIZERS else map_tree(value, kinds, placed) for k, value in tree.items()}


def _with_run_states(original: Callable[..., Any], resumes: bool) -> Callable[..., Any]:
    @wraps(original)
    def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path_or_url, str | os.PathLike):
            path = os.fspath(path_or_url)
            if holds_run_state(path):
                is_trusted = weights_only is False
                if os.path.isdir(path) or not (resumes or is_trusted):
                    return load_whole(path, map_location)
                RunState.open(path)  # verify; Lightning's own strategies need torch's format of optimizer states
                return original(path_or_url, map_location=map_location, weights_only=not is_trusted)
            _refuse_folder(path)
            if path.startswith("http") and weights_only is None:
                # Lightning's default for URLs is False, which would execute pickled code of the server.
                weights_only = True
        return original(path_or_url, map_location=map_location, weights_only=weights_only)

    load.without_run_states = original  # type: ignore[attr-defined]
    return load


def _naming_defaults(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load(cls: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        key = cls.CHECKPOINT_HYPER_PARAMS_KEY
        missing = [name for name in checkpoint.get(key + LEFT_OUT, ()) if name not in checkpoint.get(key, {})]
        if missing:
            rank_zero_warn(
                f"The checkpoint does not hold the hyper-parameters {', '.join(missing)}, so {cls.__name__} takes "
                f"their defaults. Pass them: {cls.__name__}.load_from_checkpoint(path, {missing[0]}=...); or, if it is "
                "one file that you trust, weights_only=False, which runs its code."
            )
        return original(cls, checkpoint, *args, **kwargs)

    return load


def _refuse_folder(path: str) -> None:
    if not path.startswith("http") and os.path.isdir(path):
        raise CheckpointError(
            f"{path} is a folder without a manifest: it is incomplete, or not a checkpoint. It holds "
            f"{', '.join(Folder(path).names()[:5]) or 'no file'}. Pass another checkpoint, or a file of Lightning."
        )


def _placed(tensor: Tensor, map_location: Any) -> Tensor:
    """Return a CPU tensor moved by ``map_location``."""
    if map_location is None:
        return tensor
    if isinstance(map_location, Mapping):
        return tensor.to(map_location.get("cpu", "cpu"))
    if callable(map_location):
        storage = map_location(tensor.untyped_storage(), "cpu")
        return tensor if storage is None else tensor.to(storage.device)
    return tensor.to(torch.device(map_location))
