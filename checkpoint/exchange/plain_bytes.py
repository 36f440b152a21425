"""Plain values as bytes for messages between ranks. Reading them runs no code.

In addition to values of checkpoints (``tree.py``) it supports records: dataclasses, named tuples, and classes
registered as nodes of ``torch.utils._pytree`` (such as outputs of Hugging Face models). The class of a record is looked
up by name among loaded modules: nothing is imported, and no dataclass constructor runs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpoint.format.dtypes import dtype_named
from trainwright.checkpoint.format.tensor_file import bytes_of
from trainwright.checkpoint.format.tree import UnsupportedValueError, decode, encode
from trainwright.core.errors import CheckpointError
from trainwright.core.torch_internals import _pytree as pytree

_RECORD = "~record"
_COLLECTIONS: dict[str, type] = {
    kind.__name__: kind for kind in (dict, OrderedDict, defaultdict, deque, set, frozenset)
}
_FACTORIES: dict[Any, type] = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)}
_HEAD = 8  # bytes that hold the length of the JSON text


def pack(value: Any) -> bytes:
    """Return ``value`` as bytes; equal values have equal bytes.

    Args:
        value: plain values, tensors, arrays and records, in lists, tuples, sets and dicts.

    Raises:
        UnsupportedValueError: if it holds something else.
    """
    tensors: list[Tensor] = []

    def put(path: str, tensor: Tensor) -> str:
        tensors.append(tensor.detach().cpu().contiguous())
        return str(len(tensors) - 1)

    tree = encode(_without_records(value), put, "value")
    forms = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    text = json.dumps([tree, forms], separators=(",", ":")).encode()
    return b"".join([len(text).to_bytes(_HEAD, "little"), text, *map(bytes_of, tensors)])


def unpack(data: bytes) -> Any:
    """Return the argument of :func:`pack` from its result.

    Raises:
        CheckpointError: if the bytes are malformed.
    """
    try:
        begin = _HEAD + int.from_bytes(data[:_HEAD], "little")
        tree, forms = json.loads(data[_HEAD:begin])
        tensors = []
        for name, shape in forms:
            dtype = dtype_named(name)
            if math.prod(shape) * dtype.itemsize > len(data) - begin:
                raise ValueError(f"{len(data)} bytes hold no tensor of shape {shape}")
            tensor = torch.empty(shape, dtype=dtype)
            if tensor.numel():
                bytes_of(tensor)[:] = memoryview(data)[begin : begin + tensor.nbytes]
            begin += tensor.nbytes
            tensors.append(tensor)
        return _with_records(decode(tree, lambda key: tensors[int(key)]))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, RuntimeError) as error:
        raise CheckpointError(f"A message of another rank cannot be read ({type(error).__name__}: {error}).") from error


# ---- records ---------------------------------------------------------------------------------------------------------


def _without_records(value: Any) -> Any:
    """Return ``value`` with records replaced by dicts."""
    kind = type(value)
    if kind in (list, tuple):
        return kind(_without_records(item) for item in value)
    if kind is dict and _RECORD not in value and not any(_is_record(type(key)) for key in value):
        return {key: _without_records(item) for key, item in value.items()}
    if _COLLECTIONS.get(kind.__name__) is kind:
        is_set = isinstance(value, set | frozenset)
        items = list(value.items()) if isinstance(value, dict) else sorted(value, key=repr) if is_set else list(value)
        return {_RECORD: kind.__name__, "with": _settings_of(value), "values": _without_records(items)}
    if not _is_record(kind):
        return value
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class_named(name) is not kind:
        raise UnsupportedValueError("value", value)
    if hasattr(kind, "_fields"):
        return {_RECORD: name, "values": _without_records(list(value))}
    if _has_fields(kind):
        values = {field.name: _without_records(getattr(value, field.name)) for field in dataclasses.fields(kind)}
        return {_RECORD: name, "fields": values}
    children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    return {_RECORD: name, "values": _without_records(list(children)), "with": context}


def _settings_of(value: Any) -> Any:
    """Return the constructor argument of a collection besides its items."""
    if isinstance(value, deque):
        return value.maxlen
    factory = value.default_factory if isinstance(value, defaultdict) else None
    if factory is not None and _FACTORIES.get(factory.__name__) is not factory:
        raise UnsupportedValueError("value", value)
    return None if factory is None else factory.__name__


def _with_records(value: Any) -> Any:
    kind = type(value)
    if kind in (list, tuple):
        return kind(_with_records(item) for item in value)
    if kind is not dict:
        return value
    if _RECORD not in value:
        return {key: _with_records(item) for key, item in value.items()}
    name = value[_RECORD]
    if "fields" in value:
        record: Any = object.__new__(_class_named(name))
        for field, item in value["fields"].items():
            object.__setattr__(record, field, _with_records(item))
        return record
    children = _with_records(value["values"])
    if name == "deque":
        return deque(children, value["with"])
    if name == "defaultdict":
        return defaultdict(_FACTORIES.get(value["with"]), children)
    if name in _COLLECTIONS:
        return _COLLECTIONS[name](children)
    found = _class_named(name)
    if hasattr(found, "_fields"):
        return tuple.__new__(found, children)
    return pytree.SUPPORTED_NODES[found].unflatten_fn(children, value["with"])


def _has_fields(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) and not issubclass(kind, dict)


def _is_record(kind: type) -> bool:
    if kind in pytree.SUPPORTED_NODES:
        return kind.__module__ not in ("builtins", "collections", "torch")
    return _has_fields(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _class_named(name: str) -> type:
    """Return the record class of this name from a loaded module.

    Raises:
        UnsupportedValueError: if there is none.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not _is_record(found):
        raise UnsupportedValueError("value", name)
    return found
