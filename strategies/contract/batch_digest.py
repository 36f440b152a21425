"""Checksum of a batch, to compare batches across ranks, and its structure, to compare batches of a run."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Elements sampled per tensor, evenly strided.
_MOST_ELEMENTS = 16384
_MOST_LEVELS = 8
# Items of a sequence that are looked at for its structure.
_MOST_ITEMS = 32
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_ORDERED = _INTEGERS | {torch.float16, torch.bfloat16, torch.float32, torch.float64}


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
    flat = tensor.as_subclass(Tensor).reshape(-1)  # subclasses may refuse slices
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


def structure_of(batch: Any, reads: Callable[[Tensor], bool], name: str = "batch", level: int = 0) -> Iterator[str]:
    """Yield coarse facts about a batch: keys, lengths, dtypes, shapes, and the signs of integers and masks.

    Sizes are rounded to ranges between powers of two, and shares of negative integers (ignored targets) and of zeros in
    masks to none, some, most and all.

    Args:
        batch: any nesting of mappings, sequences and objects around tensors.
        reads: whether the values of a tensor may be read, which synchronizes with its device.
        name: of ``batch`` in the facts.
        level: of nesting.
    """
    if isinstance(batch, Tensor):
        yield f"{name} is {batch.dtype} of shape ({', '.join(map(_range_of, batch.shape))})"
        if batch.layout is torch.strided and batch.dtype in _ORDERED and batch.numel() and reads(batch):
            yield from _signs(batch.detach(), name)
        return
    yield f"{name} is {type(batch).__name__}"
    if isinstance(batch, list | tuple):
        yield f"{name} has {_range_of(len(batch))} items"
        items: Iterable[tuple[str, Any]] = ((f"{name}[]", item) for item in batch)
    else:
        table = batch if isinstance(batch, Mapping) else getattr(batch, "__dict__", {})
        items = ((f"{name}[{key!r}]", item) for key, item in table.items())
    for path, item in islice(items, _MOST_ITEMS) if level < _MOST_LEVELS else ():
        yield from structure_of(item, reads, path, level + 1)


def _range_of(size: int) -> str:
    return f"{1 << size.bit_length() - 1}-{(1 << size.bit_length()) - 1}" if size > 1 else str(size)


def _signs(tensor: Tensor, name: str) -> Iterator[str]:
    least, most = (0, 1) if tensor.dtype == torch.bool else (each.item() for each in tensor.aminmax())
    if least < 0 and tensor.dtype in _INTEGERS:
        yield f"{_share(int((tensor < 0).sum()), tensor.numel())} values of {name} are negative"
    elif least >= 0 and most <= 1 and torch.equal(tensor, tensor.bool().to(tensor.dtype)):
        yield f"{_share(tensor.numel() - int(tensor.count_nonzero()), tensor.numel())} values of {name} are 0"


def _share(count: int, total: int) -> str:
    return "no" if not count else "all" if count == total else "most" if count * 2 > total else "some"
