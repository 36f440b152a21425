"""A checkpoint in the form of Lightning's own files, which know parameters of an optimizer by their position only."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig

from trainwright.checkpoint.foreign.torch_file import LazyTensor
from trainwright.checkpoint.read.run_state import StoredTensor
from trainwright.core.config.references import plain_values

# What `torch.load(weights_only=True)` takes as it is.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Tensor, torch.dtype, torch.device)
_SHOWN = 5
# In a run state: what each rank of the layout had of its own (random numbers), which no other tool can go on with. In
# Lightning's file: where the run was in its data, kept aside for the way back.
_OF_RUN = "trainwright"
_CURSORS = "combined_loader"


def as_lightning(state: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What Lightning would have saved, with a ``LazyTensor`` for each tensor.

    Everything in it is of a kind that ``torch.load(weights_only=True)`` takes: paths and dates become texts, arrays
    tensors, configurations of OmegaConf dicts.

    Args:
        state: the tree of a run state.

    Returns:
        The dict, and which values became plainer ones, in words; ``""``: none.
    """
    simplifier = _Simplifier()
    tree = {}
    for key, value in state.items():
        if key == _OF_RUN:
            continue
        if key == "optimizer_states":
            value = [positional(optimizer) for optimizer in value]
        tree[key] = simplifier.simple(value, key)
    shown = ", ".join(simplifier.changed[:_SHOWN])
    more = f" and {len(simplifier.changed) - _SHOWN} more" if len(simplifier.changed) > _SHOWN else ""
    return _with_cursors_aside(tree), f"{shown}{more}"


def with_cursors(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`as_lightning` gave, with the positions in the data back in their place."""
    tree = dict(tree)
    aside = tree.pop(_OF_RUN, None)
    if isinstance(aside, Mapping) and _CURSORS in aside:
        _fit_loop(tree)[_CURSORS] = aside[_CURSORS]
    return tree


def _with_cursors_aside(tree: dict[str, Any]) -> dict[str, Any]:
    """Take away positions in the data that only our Trainer knows: Lightning refuses states of loaders without any."""
    cursors = _fit_loop(tree).get(_CURSORS)
    if cursors and all(isinstance(cursor, dict) and {"samples", "history"} <= cursor.keys() for cursor in cursors):
        del _fit_loop(tree)[_CURSORS]
        tree[_OF_RUN] = {_CURSORS: cursors}
    return tree


def _fit_loop(tree: Mapping[str, Any]) -> dict[str, Any]:
    state = tree.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    assert isinstance(state, dict)
    return state


def positional(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's ``state_dict`` with positions in place of names, as torch has it.

    Args:
        optimizer: with ``by_name``; another one is given back as it is.
    """
    if not optimizer.get("by_name"):
        return dict(optimizer)
    groups: list[dict[str, Any]] = []
    positions: dict[str, int] = {}
    for group in optimizer["param_groups"]:
        first = len(positions)
        positions.update({name: first + index for index, name in enumerate(group["params"])})
        groups.append({**group, "params": [positions[name] for name in group["params"]]})
    rest = {key: value for key, value in optimizer.items() if key not in ("by_name", "state", "param_groups")}
    # In the order of the positions, not in that in which the ranks reported.
    state = {index: optimizer["state"][name] for name, index in positions.items() if name in optimizer["state"]}
    return {"state": state, "param_groups": groups, **rest}


class _Simplifier:
    """Turns values into such as torch's safe loading takes.

    Attributes:
        changed: where a value became another one.
    """

    def __init__(self) -> None:
        self.changed: list[str] = []

    def simple(self, value: Any, path: str) -> Any:
        """``value`` in plain classes."""
        if isinstance(value, StoredTensor):
            return LazyTensor(value.key, tuple(value.shape), value.dtype, value.whole)
        if type(value) in _PLAIN or isinstance(value, torch.Tensor):
            return value
        if isinstance(value, dict):
            copy = value.copy()  # the same class
            copy.update({key: self.simple(item, f"{path}/{key}") for key, item in value.items()})
            return copy
        if isinstance(value, torch.Size | set):
            return value
        if type(value) in (list, tuple):
            return type(value)(self.simple(item, f"{path}/{index}") for index, item in enumerate(value))
        self.changed.append(path)
        return self.simple(_plain(value), path)


def _plain(value: Any) -> Any:
    """The next plainer form of what a checkpoint can hold."""
    if isinstance(value, np.ndarray):
        return torch.tensor(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, DictConfig | ListConfig):
        return plain_values(value)
    if isinstance(value, frozenset):
        return set(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, type):
        # Lightning takes a text here for a sign to give the hyper-parameters attributes.
        return value.__name__
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"a checkpoint holds no {type(value).__name__}")
