"""The plain values that the pickle of a torch file may make: tensors, arrays, sizes, sets and the like.

Every maker here checks what it is given before it builds, since the file decides what that is.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainwright.checkpoint.foreign.pickle_machine import (
    FORWARDING,
    PLAIN_TENSORS,
    Builder,
    Inert,
    Maker,
    UnreadablePickleError,
    plain_keys,
)


class Storage(NamedTuple):
    """Bytes of a file that tensors are views of, and the dtype they were saved with."""

    data: torch.UntypedStorage
    dtype: torch.dtype


_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
    "Untyped": torch.uint8,
}
_STORAGE = re.compile(r"torch\.(?:cuda\.|storage\.)?(\w+)Storage")
_DTYPE_CODE = re.compile(r"[biufc]\d{1,2}")


def storage_dtype(kind: Any) -> torch.dtype:
    """The dtype of a class of storages, given by its name.

    Raises:
        UnreadablePickleError: if it is no class of storages that this package reads.
    """
    match = _STORAGE.fullmatch(kind.name) if isinstance(kind, Inert) else None
    if match is None or match[1] not in _STORAGES:
        raise UnreadablePickleError(f"a storage of kind {kind!r}")
    return _STORAGES[match[1]]


# ---- tensors ---------------------------------------------------------------------------------------------------------


def view(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor upon the bytes of a storage.

    Raises:
        UnreadablePickleError: if it would reach outside them.
    """
    numbers = (offset, *size, *stride)
    if (
        not isinstance(storage, Storage)
        or len(size) != len(stride)
        or any(type(n) is not int or n < 0 for n in numbers)
    ):
        raise UnreadablePickleError("a tensor whose shape is none")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if 0 not in size and (last + 1) * dtype.itemsize > storage.data.nbytes():
        raise UnreadablePickleError(
            f"a tensor of shape {tuple(size)} that reaches outside its {len(storage.data)} bytes"
        )
    if 0 in size:
        return torch.empty(tuple(size), dtype=dtype)
    return torch.empty(0, dtype=dtype).set_(storage.data, offset, torch.Size(size), tuple(stride))


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any = False, hooks: Any = (), meant: Any = None
) -> Tensor:
    dtype = storage.dtype if isinstance(storage, Storage) else None
    return _tensor_of_dtype(storage, offset, size, stride, grad, hooks, dtype, meant)


def _tensor_of_dtype(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, meant: Any = None
) -> Tensor:
    if meant or not isinstance(dtype, torch.dtype):
        # A mark such as "conj" says that the values are meant changed.
        raise UnreadablePickleError(f"a tensor of {dtype} with the marks {meant}")
    return view(storage, offset, size, stride, dtype)


def _parameter(data: Any, *more: Any) -> Tensor:
    if not isinstance(data, Tensor):
        raise UnreadablePickleError("a parameter without a tensor")
    return data


def _size(values: Any = ()) -> torch.Size:
    return torch.Size(values)


def _device(kind: str, index: int | None = None) -> torch.device:
    return torch.device(kind) if index is None else torch.device(kind, index)


# ---- numpy -----------------------------------------------------------------------------------------------------------


class _Array:
    """An array whose contents follow as its state."""


class _Dtype:
    """A dtype whose byte order follows as its state. Not numpy's, of which equal ones are one object."""

    def __init__(self, code: str) -> None:
        self.code = code


def _dtype(code: Any, *more: Any) -> Any:
    if isinstance(code, str) and _DTYPE_CODE.fullmatch(code):
        return _Dtype(code)
    return Inert("numpy.dtype", (code, *more))


def _order_dtype(value: _Dtype, state: Any) -> Any:
    order = state[1]
    if order not in ("<", ">", "=", "|"):
        raise UnreadablePickleError("an array of unknown byte order")
    return np.dtype(value.code).newbyteorder(order)


def _scalar(dtype: Any, data: Any = b"") -> Any:
    if not isinstance(dtype, np.dtype):
        return Inert("numpy.scalar", (dtype, data))
    (value,) = np.frombuffer(data, dtype)
    return value


def _new_array(*more: Any) -> _Array:
    return _Array()


def _fill_array(value: _Array, state: Any) -> Any:
    _, shape, dtype, columns_first, data = state
    return _array(data, dtype, shape, "F" if columns_first else "C")


def _array(data: Any, dtype: Any, shape: Any, order: str = "C") -> Any:
    if not isinstance(dtype, np.dtype) or not isinstance(data, bytes | bytearray):
        return Inert("numpy.ndarray", (data, dtype, shape, order))
    if len(data) != dtype.itemsize * math.prod(shape):
        raise UnreadablePickleError(f"an array of shape {shape} with {len(data)} bytes")
    values = np.frombuffer(data, dtype).reshape(shape, order="F" if order == "F" else "C")
    return np.array(values, dtype.newbyteorder("="), order="K")


# ---- the rest of Python ----------------------------------------------------------------------------------------------


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise UnreadablePickleError(f"bytes in {encoding}")
    return text.encode(encoding)


def _bytes(data: Any = b"") -> bytes:
    return bytes(_buffer(data))


def _buffer(data: Any = b"", encoding: str = "latin1") -> bytearray:
    # A number would ask for that many bytes.
    if isinstance(data, str):
        return bytearray(_encode(data, encoding))
    if not isinstance(data, bytes | bytearray | list):
        raise UnreadablePickleError("bytes of what are none")
    return bytearray(data)


def _items(values: Any = ()) -> list[Any]:
    if not isinstance(values, list | tuple | set | frozenset):
        raise UnreadablePickleError("a container of what is none")
    return list(values)


def _flat_items(values: Any = ()) -> list[Any]:
    return plain_keys(_items(values))


def _ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    return OrderedDict((key, value) for key, value in _pairs(pairs))


def _plain_dict(*args: Any) -> dict[Any, Any]:
    # A Namespace takes nothing, a defaultdict the class of its values, an AttributeDict or a Counter what it holds.
    given = args[0] if args and isinstance(args[0], dict | list | tuple) else ()
    return dict(_pairs(given))


def _pairs(given: Any) -> list[tuple[Any, Any]]:
    pairs = [(key, value) for key, value in (given.items() if isinstance(given, dict) else given)]
    plain_keys([key for key, _ in pairs])
    return pairs


def _state_of_ordered(value: OrderedDict[Any, Any], state: Any) -> OrderedDict[Any, Any]:
    # The versions of modules; any other attribute could hide a method of the dict.
    if isinstance(state, dict) and isinstance(state.get("_metadata"), dict):
        value._metadata = state["_metadata"]  # type: ignore[attr-defined]
    return value


def _state_of_dict(value: dict[Any, Any], state: Any) -> dict[Any, Any]:
    if not isinstance(state, dict):
        raise UnreadablePickleError("a namespace whose attributes are none")
    value.update(state)
    return value


CONSTANTS: dict[str, Any] = dict(_DTYPES)

MAKERS: dict[str, Maker] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": {"torch.strided": torch.strided}.__getitem__,
    "numpy.dtype": _dtype,
    "collections.OrderedDict": _ordered,
    "_codecs.encode": _encode,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _buffer,
    "builtins.complex": complex,
    "builtins.list": _items,
    "builtins.tuple": lambda values=(): tuple(_items(values)),
    "builtins.set": lambda values=(): set(_flat_items(values)),
    "builtins.frozenset": lambda values=(): frozenset(_flat_items(values)),
    **dict.fromkeys(("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"), _scalar),
    **dict.fromkeys(("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"), _new_array),
    **dict.fromkeys(("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"), _array),
    **dict.fromkeys(
        (
            "argparse.Namespace",
            "types.SimpleNamespace",
            "builtins.dict",
            "collections.defaultdict",
            "collections.Counter",
            "lightning.fabric.utilities.data.AttributeDict",
            "lightning.pytorch.utilities.parsing.AttributeDict",
            "pytorch_lightning.utilities.parsing.AttributeDict",
        ),
        _plain_dict,
    ),
}

BUILDERS: dict[type, Builder] = {
    _Array: _fill_array,
    OrderedDict: _state_of_ordered,
    dict: _state_of_dict,
    _Dtype: _order_dtype,
}


def is_plain(name: str) -> bool:
    """Whether a name in a pickle stands for a plain value or a kind of tensor."""
    return (
        name in CONSTANTS
        or name in MAKERS
        or name in FORWARDING
        or _STORAGE.fullmatch(name) is not None
        or (name in PLAIN_TENSORS)
    )
