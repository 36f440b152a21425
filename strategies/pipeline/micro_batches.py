"""Splitting of nested batches into micro-batches along the samples."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
from torch import Tensor

from trainwright.strategies.pipeline.batch_kinds import kind_of

# Path of a tensor ("inputs.0.ids") -> its dim of samples; None: every micro-batch gets it whole.
BatchDims = Mapping[str, int | None]


def batch_size_of(batch: Any, dims: BatchDims | None = None) -> int:
    """Return the number of samples: the length of tensors along their batch dim (0 unless in ``dims``).

    Args:
        batch: tensors nested in mappings, sequences and dataclasses.
        dims: exceptions by path; default: none.

    Raises:
        ValueError: if tensors disagree, there is none, or ``dims`` names a missing one.
    """
    sizes = {path: tensor.shape[dim] for path, tensor, dim in _tensors(batch, dims or {}) if dim is not None}
    sizes |= _sizes_of_objects(batch)
    unknown = set(dims or ()) - {path for path, _, _ in _tensors(batch, dims or {})}
    if unknown:
        raise ValueError(
            f"batch_dims names {sorted(unknown)}, but the batch has no such tensor. Its tensors are: "
            f"{[path for path, _, _ in _tensors(batch, {})]}."
        )
    if not sizes:
        raise ValueError(
            "The batch holds no tensor with a batch dimension, so it cannot be split into micro-batches for the "
            "pipeline. Return at least one tensor with samples along dim 0."
        )
    counts = list(sizes.values())
    common = max(set(counts), key=lambda size: (counts.count(size), -counts.index(size)))
    for path, size in sizes.items():
        if size != common:
            raise ValueError(
                f"The tensor {path!r} of the batch has length {size} along its batch dim, others have {common}. To "
                f"split it along another dim, type batch_dims={{{path!r}: <dim>}}; to give it whole to every "
                f"micro-batch, batch_dims={{{path!r}: null}}. If it belongs to an object such as a batch of graphs, "
                "say how that is split: trainwright.register_batch(cls, size, select)."
            )
    return common


def check_samples(batch: Any, dims: BatchDims, size: int, samples: int) -> None:
    """Check the length along batch dims against the loader's batch size.

    Args:
        batch: the first of a run.
        dims: exceptions to dim 0, by path.
        size: from :func:`batch_size_of`.
        samples: of a batch, according to its loader; the last batch of an epoch may have fewer.

    Raises:
        ValueError: if samples lie along another or an unknown dim.
    """
    tensors = [(path, tensor) for path, tensor, dim in _tensors(batch, dims) if dim is not None]
    elsewhere = {path: tuple(t.shape).index(samples) for path, t in tensors if samples in t.shape}
    if size == samples or (size < samples and not elsewhere) or not tensors:
        return
    example = ", ".join(f"{path!r}: {dim}" for path, dim in elsewhere.items()) or f"{tensors[0][0]!r}: <dim>"
    raise ValueError(
        f"The tensors of the batch have length {size} along the dim of samples ({tensors[0][0]!r} has shape "
        f"{tuple(tensors[0][1].shape)}), but the loader makes batches of {samples} samples. A pipeline splits a batch "
        f"by samples, by default along dim 0: type strategy.batch_dims={{{example}}} for tensors such as (time, "
        "batch), with null to give a tensor whole to every micro-batch."
    )


def part_sizes(size: int, parts: int) -> list[int]:
    """Return the number of samples of each micro-batch, as even as possible, larger ones first.

    Raises:
        ValueError: if there are fewer samples than micro-batches.
    """
    if not 1 <= parts <= size:
        raise ValueError(f"{size} samples cannot be split into {parts} micro-batches. Use 1 to {size}.")
    return [size // parts + (part < size % parts) for part in range(parts)]


def split_batch(batch: Any, parts: int, dims: BatchDims | None = None) -> list[Any]:
    """Return the micro-batches of ``batch``, with the same nesting; tensors are views.

    Tensors are split along dim 0 (or ``dims``), lists and tuples without tensors that are as long as the batch by
    element. Numbers, strings, ``None`` and 0-dim tensors are given to every micro-batch.

    Args:
        batch: mappings (including ``BatchEncoding``), lists, tuples, named tuples and dataclasses, nested.
        parts: number of micro-batches, at most the number of samples.
        dims: exceptions by path; default: none.

    Raises:
        ValueError: see :func:`batch_size_of` and :func:`part_sizes`.
        TypeError: for an object with tensors that cannot be split.
    """
    size = batch_size_of(batch, dims)
    sizes = part_sizes(size, parts)
    starts = [sum(sizes[:part]) for part in range(parts)]
    pieces = [slice(start, start + length) for start, length in zip(starts, sizes, strict=True)]
    return [_slice(batch, piece, size, dims or {}, "") for piece in pieces]


def _dim_of(tensor: Tensor, path: str, dims: BatchDims) -> int | None:
    if path in dims:
        dim = dims[path]
        if dim is not None and not -tensor.ndim <= dim < tensor.ndim:
            raise ValueError(
                f"batch_dims={{{path!r}: {dim}}}: that tensor has shape {tuple(tensor.shape)}, so the dim must be "
                f"below {tensor.ndim}."
            )
        return dim
    return 0 if tensor.ndim else None


def _tensors(
    batch: Any, dims: BatchDims, path: str = "", within: bool = False
) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yield path, tensor and dim of samples; ``None`` for tensors ``within`` an object that is split by its kind."""
    if isinstance(batch, Tensor):
        yield path, batch, None if within else _dim_of(batch, path, dims)
    within = within or kind_of(batch) is not None
    for name, value in _children(batch):
        yield from _tensors(value, dims, _path_of(path, name), within)


def _sizes_of_objects(batch: Any, path: str = "") -> dict[str, int]:
    kind = kind_of(batch)
    if kind is not None:
        return {path: kind.size(batch)}
    children = ((_path_of(path, name), value) for name, value in _children(batch))
    return {key: size for each, value in children for key, size in _sizes_of_objects(value, each).items()}


def _path_of(parent: str, name: Any) -> str:
    return f"{parent}.{name}" if parent else str(name)


def _children(batch: Any) -> list[tuple[Any, Any]]:
    if isinstance(batch, Tensor):
        return []
    if isinstance(batch, Mapping):
        return list(batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return list(zip(batch._fields, batch, strict=True))
    if isinstance(batch, (list, tuple)):
        return list(enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [(field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch)]
    return list(vars(batch).items()) if kind_of(batch) is not None and hasattr(batch, "__dict__") else []


def _slice(batch: Any, piece: slice, size: int, dims: BatchDims, path: str) -> Any:
    if isinstance(batch, Tensor):
        dim = _dim_of(batch, path, dims)
        return batch if dim is None else batch.narrow(dim, piece.start, piece.stop - piece.start)
    if (kind := kind_of(batch)) is not None:
        return kind.select(batch, piece)
    is_listed = isinstance(batch, list | tuple) and not hasattr(batch, "_fields")
    if is_listed and len(batch) == size and next(_tensors(batch, {}), None) is None:
        return type(batch)(batch[piece])
    if isinstance(batch, np.ndarray) and batch.ndim and len(batch) == size:
        return batch[piece]
    if children := _children(batch):
        return _rebuilt(batch, {n: _slice(value, piece, size, dims, _path_of(path, n)) for n, value in children})
    if any(isinstance(value, Tensor) for value in getattr(batch, "__dict__", {}).values()):
        raise TypeError(
            f"The batch holds a {type(batch).__name__}{f' at {path!r}' if path else ''}, whose tensors cannot be split "
            "into micro-batches. Collate into dicts, lists, tuples or dataclasses of tensors, or say how it is split: "
            f"trainwright.register_batch({type(batch).__name__}, size, select)."
        )
    return batch


def _rebuilt(batch: Any, values: dict[Any, Any]) -> Any:
    """Return a copy of ``batch`` with other children."""
    if isinstance(batch, Mapping) and not isinstance(batch, MutableMapping):
        return type(batch)(values)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(values.values())
    if isinstance(batch, list | tuple):
        return type(batch)(values.values())
    new = copy.copy(batch)  # keeps attributes of a subclass besides its items
    for name, value in values.items():
        new.__setitem__(name, value) if isinstance(batch, Mapping) else object.__setattr__(new, name, value)
    return new


def copied(batch: Any) -> Any:
    """Return the batch with copies of its tensors."""
    if isinstance(batch, Tensor):
        return batch.clone()
    if kind_of(batch) is not None:
        return copy.deepcopy(batch)
    children = _children(batch)
    return _rebuilt(batch, {name: copied(value) for name, value in children}) if children else batch


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch."""
    return [tensor for _, tensor, _ in _tensors(batch, {})]


def signature(value: Any) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Return paths, shapes and dtypes of all tensors, which determine the shapes of a step."""
    return tuple((path, tuple(tensor.shape), str(tensor.dtype)) for path, tensor, _ in _tensors(value, {}))


def replace_argument(args: tuple[Any, ...], kwargs: dict[str, Any], old: Any, new: Any) -> tuple[Any, dict[str, Any]]:
    """Return the arguments with ``old`` (by identity) replaced by ``new``.

    Raises:
        ValueError: if ``old`` is none of them.
    """
    if not any(value is old for value in (*args, *kwargs.values())):
        raise ValueError("The batch is none of the step's arguments. Pass it on as received by the hook.")
    return (
        tuple(new if value is old else value for value in args),
        {name: new if value is old else value for name, value in kwargs.items()},
    )
