"""Checksum of a batch, to compare batches across ranks."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Elements sampled per tensor, evenly strided.
_MOST_ELEMENTS = 16384
_MOST_LEVELS = 8


def batch_digest(batch: Any, before: int = 0) -> int:
    """Return a CRC-32 of the shapes, dtypes and (sampled) values of a batch. Synchronizes with the device.

    Args:
        batch: any nesting of mappings, sequences, dataclasses and objects around tensors, arrays and plain values.
        before: digest to continue from.
    """
    for piece in _pieces(batch, 0):
        before = zlib.crc32(piece, before)
    return before


def _pieces(value: Any, level: int) -> Iterator[bytes]:
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = torch.from_numpy(value) if value.dtype.kind in "biufc" else value.tolist()
    if isinstance(value, Tensor):
        yield f"{tuple(value.shape)}{value.dtype}".encode()
        if value.layout is torch.strided and not value.is_meta and value.numel():
            yield _sample(value.detach())
    elif isinstance(value, str | int | float | complex | bytes | None):
        yield repr(value).encode()
    elif level < _MOST_LEVELS:
        for item in _items(value):
            yield from _pieces(item, level + 1)


def _sample(tensor: Tensor) -> bytes:
    flat = tensor.reshape(-1)
    chosen = flat[:: -(-flat.numel() // _MOST_ELEMENTS)].resolve_conj().contiguous()
    return chosen.view(torch.uint8).cpu().numpy().tobytes()


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key if isinstance(key, str | int) else None
            yield item
    elif isinstance(value, list | tuple):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name) for field in dataclasses.fields(value))
    else:
        yield from getattr(value, "__dict__", {}).values()
