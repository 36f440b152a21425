"""Batches that are objects: how many samples they hold, and how to select some."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class BatchKind(NamedTuple):
    """How batches of a class are split.

    Attributes:
        size: returns the number of samples of a batch.
        select: returns the batch of the samples of a slice.
    """

    size: Callable[[Any], int]
    select: Callable[[Any, slice], Any]


_PLAIN = frozenset((torch.Tensor, dict, list, tuple, str, int, float, bool, type(None)))
_REGISTERED: dict[type, BatchKind] = {}


def register_batch(
    cls: type,
    size: Callable[[Any], int] = len,
    select: Callable[[Any, slice], Any] = operator.getitem,
) -> None:
    """Register a class of batches, so that a pipeline can split them into micro-batches.

    Dicts, lists, tuples and dataclasses of tensors ``(samples, ...)``, TensorDicts and batches of PyTorch Geometric
    need none.

    Args:
        cls: the class; subclasses included.
        size: ``size(batch)`` returns its number of samples.
        select: ``select(batch, piece)`` returns the batch of the samples ``range(size)[piece]``, with a step of 1.
    """
    _REGISTERED[cls] = BatchKind(size, select)


def kind_of(value: Any) -> BatchKind | None:
    """Return how to split an object; ``None``: as its items are."""
    if type(value) in _PLAIN:
        return None
    for cls in type(value).__mro__:
        if cls in _REGISTERED:
            return _REGISTERED[cls]
    if isinstance(sizes := getattr(value, "batch_size", None), torch.Size) and len(sizes):  # a TensorDict
        return BatchKind(lambda batch: batch.batch_size[0], operator.getitem)
    if hasattr(value, "num_graphs") and hasattr(type(value), "from_data_list"):  # of PyTorch Geometric
        return BatchKind(lambda batch: batch.num_graphs, _graphs)
    return None


def _graphs(batch: Any, piece: slice) -> Any:
    keys = set(batch.keys())
    follows = [key for key in keys if f"{key}_batch" in keys]
    return type(batch).from_data_list(batch.to_data_list()[piece], follow_batch=follows)
