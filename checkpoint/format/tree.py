"""Nested Python values as JSON, with tensors stored elsewhere under keys; nothing is pickled.

Values without a JSON form become marked objects, ``{"~": kind, ...}``. Reading accepts a fixed list of kinds, all plain
data: no name in a file is looked up, imported or called.
"""

from __future__ import annotations

import base64
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from trainwright.checkpoint.format.dtypes import dtype_named
from trainwright.core.config.references import literal, plain_values
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import ContentError
from trainwright.core.text.printable import shortened

_MARK = "~"
_NUMPY_CODE = re.compile(r"[<>|=]?(?:[biufcSU]\d{1,9}|[mM]8(?:\[\w{1,8}\])?)")
_CLASSES: dict[str, type] = {
    "dict": dict,
    "list": list,
    "omegaconf.DictConfig": DictConfig,
    "omegaconf.ListConfig": ListConfig,
}

Put = Callable[[str, Tensor], str]
Get = Callable[[str], Any]


class UnsupportedValueError(CheckpointError):
    """A value that a checkpoint cannot hold.

    Args:
        path: of the value, such as ``callbacks/Mine/lock``.
        value: the value.
    """

    def __init__(self, path: str, value: object) -> None:
        self.path = path
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        super().__init__(
            f"{path} is a {kind}, which a checkpoint cannot hold: it takes numbers, strings, None, tensors, numpy "
            "arrays, paths, dates, and lists, tuples, sets and dicts of these, so that reading it never runs code. "
            "Let state_dict() or on_save_checkpoint() give one of these instead, for example vars(value)."
        )


def encode(tree: Any, put: Put, path: str = "") -> Any:
    """Return ``tree`` as a JSON value.

    Args:
        tree: nested containers of plain values, tensors and arrays.
        put: called with the path and each tensor of at least one dim; returns the key to store it under.
        path: of ``tree``, for messages and keys.

    Raises:
        UnsupportedValueError: if a value has no form.
    """
    if tree is None or type(tree) in (bool, int, str):
        return tree
    if isinstance(tree, Tensor):
        return _scalar(tree) if tree.dim() == 0 else reference(put(path, tree))
    if isinstance(tree, dict):
        return _encode_dict(tree, put, path)
    if isinstance(tree, DictConfig | ListConfig):
        return {_MARK: "omegaconf", "v": encode(plain_values(tree), put, path)}
    if isinstance(tree, list | tuple | set | frozenset) and not hasattr(tree, "_fields"):
        return _encode_items(tree, put, path)
    for kinds, write in _WRITERS:
        if isinstance(tree, kinds):
            return write(tree)
    if isinstance(tree, np.ndarray) and tree.dtype.kind in "biufc":
        if tree.ndim == 0:
            return {_MARK: "ndarray", "v": _scalar(torch.as_tensor(tree))}
        return {_MARK: "ndarray", "v": reference(put(path, torch.tensor(tree)))}
    if isinstance(tree, type) and tree in _CLASSES.values():
        return {_MARK: "class", "v": next(name for name, cls in _CLASSES.items() if cls is tree)}
    raise UnsupportedValueError(path, tree)


def reference(key: str) -> dict[str, str]:
    """Return the encoded reference to a tensor stored under a key."""
    return {_MARK: "tensor", "key": key}


def encode_supported(values: Mapping[str, Any], put: Put, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Encode the entries of a mapping that have a form; return them, and the others as they are."""
    tree, others = {}, {}
    for name, value in values.items():
        try:
            tree[name] = encode(value, put, f"{path}/{name}" if path else name)
        except UnsupportedValueError:
            others[name] = value
    return tree, others


def with_types(values: Mapping[str, Any]) -> str:
    """Return ``name (type), ...`` for messages."""
    return ", ".join(f"{name} ({type(value).__name__})" for name, value in values.items())


def _encode_dict(tree: dict[Any, Any], put: Put, path: str) -> Any:
    ordered = isinstance(tree, OrderedDict)
    if not ordered and all(type(key) is str for key in tree) and _MARK not in tree:
        return {key: encode(value, put, f"{path}/{key}" if path else key) for key, value in tree.items()}
    items = [[encode(k, put, path), encode(v, put, f"{path}/{k}" if path else str(k))] for k, v in tree.items()]
    return {_MARK: "OrderedDict" if ordered else "dict", "v": items}


def _encode_items(tree: Any, put: Put, path: str) -> Any:
    # Sorted, so that equal sets give equal files.
    values = sorted(tree, key=repr) if isinstance(tree, set | frozenset) else tree
    encoded = [encode(value, put, f"{path}/{index}") for index, value in enumerate(values)]
    if isinstance(tree, torch.Size):
        return {_MARK: "Size", "v": encoded}
    for kind in (tuple, set, frozenset):
        if isinstance(tree, kind):
            return {_MARK: kind.__name__, "v": encoded}
    return encoded


def _scalar(tensor: Tensor) -> dict[str, Any]:
    value = tensor.detach().cpu()
    return {_MARK: "scalar", "dtype": str(value.dtype).removeprefix("torch."), "v": encode(value.item(), _no_tensor)}


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {_MARK: "float", "v": repr(float(value))}


def _no_tensor(path: str, tensor: Tensor) -> str:
    raise AssertionError("a scalar holds no tensor")


# Subclasses before their bases. Subclasses of numbers and strings (such as members of an IntEnum) become plain ones.
_WRITERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (np.generic, lambda v: {_MARK: "numpy", "dtype": v.dtype.str, "v": encode(v.item(), _no_tensor)}),
    (bool, bool),
    (int, int),
    (float, lambda v: _float(float(v))),
    (str, lambda v: str.__str__(v)),
    (complex, lambda v: {_MARK: "complex", "v": [_float(v.real), _float(v.imag)]}),
    (bytes, lambda v: {_MARK: "bytes", "v": base64.b64encode(v).decode("ascii")}),
    (PurePath, lambda v: {_MARK: "path", "v": str(v)}),
    (datetime, lambda v: {_MARK: "datetime", "v": v.isoformat()}),
    (timedelta, lambda v: {_MARK: "timedelta", "v": [v.days, v.seconds, v.microseconds]}),
    (torch.dtype, lambda v: {_MARK: "dtype", "v": str(v).removeprefix("torch.")}),
    (torch.device, lambda v: {_MARK: "device", "v": str(v)}),
)


def decode(value: Any, get: Get) -> Any:
    """Return the argument of :func:`encode` from its result.

    Args:
        value: from JSON.
        get: returns the tensor of a key, or a lazy reader of it.

    Raises:
        ContentError: if a mark is unknown (written by a newer version) or malformed.
    """
    if isinstance(value, list):
        return [decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: decode(item, get) for key, item in value.items()}
    kind = value[_MARK]
    try:
        if kind == "tensor":
            return get(value["key"])
        if kind in ("dict", "OrderedDict"):
            items = [(decode(k, get), decode(v, get)) for k, v in value["v"]]
            return OrderedDict(items) if kind == "OrderedDict" else dict(items)
        if kind in _READERS:
            return _READERS[kind](value, decode(value["v"], get))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError | ContentError):
            raise
        raise ContentError(
            f"it holds a {shortened(repr(kind))} that cannot be read: {shortened(repr(error))}"
        ) from error
    raise ContentError(
        f"it holds a value of the unknown kind {shortened(repr(kind))}; this version knows "
        f"{', '.join(sorted(_READERS))}: update trainwright if a newer version wrote it"
    )


# Names of the known entries of Lightning's checkpoint dict, by type.
_SECTIONS: dict[type, tuple[str, ...]] = {
    int: ("epoch", "global_step"),
    str: ("pytorch-lightning_version",),
    list: ("lr_schedulers", "optimizer_states"),
    dict: ("callbacks", "loops", "state_dict", "trainwright"),
}


def check_sections(tree: Any) -> None:
    """Raise if a tree is not a checkpoint dict of a run, before parts of it are restored.

    Raises:
        ContentError: if it is not.
    """
    if not isinstance(tree, dict):
        raise ContentError("it is not a mapping")
    for kind, name in ((kind, name) for kind, names in _SECTIONS.items() for name in names):
        value = tree.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ContentError(f"{name} is a {type(value).__name__}")
    for optimizer in tree.get("optimizer_states") or ():
        if not isinstance(optimizer, dict):
            raise ContentError(f"the state of an optimizer is a {type(optimizer).__name__}")
        if optimizer.get("by_name"):
            _check_optimizer(optimizer)


def _check_optimizer(state: dict[str, Any]) -> None:
    groups, values = state.get("param_groups"), state.get("state")
    named = isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(name, str) for name in group["params"])
        for group in groups
    )
    if not named or not isinstance(values, dict) or not all(isinstance(each, dict) for each in values.values()):
        raise ContentError("the state of an optimizer does not list parameters by name")


def _number(value: Any) -> Any:
    if not isinstance(value, bool | int | float | complex):
        raise ContentError(f"a {type(value).__name__} is not a number")
    return value


def _numpy_type(code: Any) -> Any:
    # Other codes could allocate memory of any size or objects.
    if not isinstance(code, str) or not _NUMPY_CODE.fullmatch(code):
        raise ContentError(f"{shortened(repr(code))} is not a numpy dtype")
    return np.dtype(code).type


def _config(value: Any) -> Any:
    # Text would be parsed as YAML, whose aliases can expand to more values than fit into memory.
    if not isinstance(value, dict | list):
        raise ContentError(f"a {type(value).__name__} is not a configuration")
    try:
        return OmegaConf.create(value)
    except OmegaConfBaseException as error:
        raise ContentError(f"not a configuration: {error}") from error


_READERS: dict[str, Callable[[dict[str, Any], Any], Any]] = {
    "Size": lambda _, v: torch.Size(v),
    "tuple": lambda _, v: tuple(v),
    "set": lambda _, v: set(v),
    "frozenset": lambda _, v: frozenset(v),
    "scalar": lambda raw, v: torch.tensor(_number(v), dtype=dtype_named(raw["dtype"])),
    "ndarray": lambda _, v: v.numpy() if isinstance(v, Tensor) else v,
    "numpy": lambda raw, v: _numpy_type(raw["dtype"])(v),
    "float": lambda _, v: float(v),
    "complex": lambda _, v: complex(*v),
    "bytes": lambda _, v: base64.b64decode(v, validate=True),
    "path": lambda _, v: Path(v),
    "datetime": lambda _, v: datetime.fromisoformat(v),
    "timedelta": lambda _, v: timedelta(*v),
    "dtype": lambda _, v: dtype_named(v),
    "device": lambda _, v: torch.device(v),
    "class": lambda _, v: _CLASSES[v],
    # Untrusted files must not make the reader look up environment variables or call resolvers.
    "omegaconf": lambda _, v: _config(literal(v)),
}
