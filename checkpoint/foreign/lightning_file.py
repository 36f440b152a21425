"""Conversion to Lightning's checkpoint dict, whose optimizer states refer to parameters by position."""

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

# Types that `torch.load(weights_only=True)` accepts.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Tensor, torch.dtype, torch.device)
_SHOWN = 5
# In a run state: rank-local state (random numbers), useless to other tools. In Lightning's file: the position in the
# data, for importing it again.
_OF_RUN = "trainwright"
_CURSORS = "combined_loader"


def as_lightning(state: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return Lightning's checkpoint dict, with a ``LazyTensor`` for each tensor.

    All its values are accepted by ``torch.load(weights_only=True)``: paths and dates become texts, arrays tensors,
    OmegaConf configurations dicts.

    Args:
        state: the tree of a run state.

    Returns:
        The dict, and a list of the values that were simplified, as text; ``""``: none.
    """
    changed: list[str] = []
    tree = {}
    for key, value in state.items():
        if key == _OF_RUN:
            continue
        if key == "optimizer_states":
            value = [positional(optimizer) for optimizer in value]
        tree[key] = _simple(value, key, changed)
    shown = ", ".join(changed[:_SHOWN])
    more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    return _with_cursors_aside(tree), f"{shown}{more}"


def with_cursors(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Undo how :func:`as_lightning` moves positions in the data aside."""
    tree = dict(tree)
    aside = tree.pop(_OF_RUN, None)
    if isinstance(aside, Mapping) and _CURSORS in aside:
        _fit_loop(tree)[_CURSORS] = aside[_CURSORS]
    return tree


def _with_cursors_aside(tree: dict[str, Any]) -> dict[str, Any]:
    """Move positions in the data aside, since Lightning refuses states of loaders that do not have any."""
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
    """Return an optimizer's ``state_dict`` with positions instead of names, as in torch.

    Args:
        optimizer: with ``by_name``; others are returned unchanged.
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
    # Ordered by position, not by rank.
    state = {index: optimizer["state"][name] for name, index in positions.items() if name in optimizer["state"]}
    return {"state": state, "param_groups": groups, **rest}


def _simple(value: Any, path: str, changed: list[str]) -> Any:
    """Return ``value`` in types that torch's safe loading accepts; add the paths of converted values to ``changed``."""
    if isinstance(value, StoredTensor):
        return LazyTensor(value.key, tuple(value.shape), value.dtype, value.whole)
    if type(value) in _PLAIN or isinstance(value, torch.Tensor | torch.Size | set):
        return value
    if isinstance(value, dict):
        copy = value.copy()  # the same class
        copy.update({key: _simple(item, f"{path}/{key}", changed) for key, item in value.items()})
        return copy
    if type(value) in (list, tuple):
        return type(value)(_simple(item, f"{path}/{index}", changed) for index, item in enumerate(value))
    changed.append(path)
    return _simple(_plain(value), path, changed)


def _plain(value: Any) -> Any:
    """Return the next simpler form of a value that a checkpoint can hold."""
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
        # Lightning then rebuilds hyper-parameters with attribute access.
        return value.__name__
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}")
