"""Streaming writer of torch's file format (``torch.save``), one tensor at a time.

``torch.save`` needs all tensors in memory. Here the objects are pickled first, with placeholders for tensors still on
disk; then each tensor is read, written and freed. The file is a zip archive of ``data.pkl`` and the bytes of each
storage, uncompressed and aligned to 64 bytes for memory-mapping.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor
from torch.nn import Parameter

from trainwright.checkpoint.format.records import FileRecord
from trainwright.checkpoint.format.tensor_file import bytes_of
from trainwright.core.errors import CheckpointError
from trainwright.core.text.printable import one_line, shortened

# Bytes; alignment of storages in `torch.save`.
_ALIGNMENT = 64
_ROOT = "archive"
# Bytes of a zip entry's local header without name and extra fields, and of the extra field of 64-bit sizes.
_LOCAL_HEADER = 30
_SIZES_FIELD = 20
# Id of an extra field that readers skip, as torch uses for padding.
_PADDING_FIELD = b"FB"


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor that is read when it is written.

    Args:
        key: tensors of one key are stored once and share memory when loaded.
        shape: its shape.
        dtype: its dtype.
        read: returns the tensor, on the CPU.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize


Held = Mapping[int, LazyTensor | None]
"""Tensors in memory by address: stored once, as the lazy tensor says. ``None``: a part of a tensor, never pickled."""


def write_torch_file(file: BinaryIO, tree: Any) -> None:
    """Write ``tree`` like ``torch.save``, with at most one lazy tensor in memory at a time.

    Args:
        file: output; a seekable file gets a plain archive, another one an archive with trailing sizes.
        tree: dicts, lists, tuples, numbers, texts, tensors and :class:`LazyTensor`. Other values are pickled, and
            ``torch.load(weights_only=True)`` may refuse them.

    Raises:
        ValueError: if a lazy tensor has another shape or dtype than declared.
    """
    with TorchFileWriter(file) as writer:
        writer.write(tree)


class TorchFileWriter(AbstractContextManager["TorchFileWriter"]):
    """Writer of one file of ``torch.save``, with additional records that ``torch.load`` ignores.

    Args:
        file: see :func:`write_torch_file`.

    Attributes:
        records: record of each zip entry, by its name within the archive with ``/`` as ``.``.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.records: dict[str, FileRecord] = {}
        self._file = file
        self._archive = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)

    def write(self, tree: Any, beside: Sequence[LazyTensor] = (), held: Held | None = None) -> dict[str, str]:
        """Write ``tree``, and tensors that are not in it.

        Args:
            tree: see :func:`write_torch_file`.
            beside: the other tensors.
            held: tensors that objects in ``tree`` may refer to, see :data:`Held`; ``None``: none.

        Returns:
            Name of the record of each tensor, by its key.

        Raises:
            ValueError: if a lazy tensor has another shape or dtype than declared.
        """
        pickled = io.BytesIO()
        pickler = _TensorPickler(pickled, held or {})
        pickler.dump(tree)
        tensors = {**{lazy.key: lazy for lazy in beside}, **pickler.tensors}
        # In the order of the storage numbers in the pickle.
        tensors = {key: tensors[key] for key in dict.fromkeys((*pickler.tensors, *tensors))}
        self.add("data.pkl", pickled.getvalue())
        self.add("byteorder", sys.byteorder.encode())
        for index, lazy in enumerate(tensors.values()):
            self._write_storage(f"data/{index}", lazy)
        self.add("version", b"3\n")
        return {key: f"data.{index}" for index, key in enumerate(tensors)}

    def add(self, name: str, data: bytes) -> None:
        """Write a record of bytes."""
        self._archive.writestr(zipfile.ZipInfo(f"{_ROOT}/{name}"), data)
        self._record(name, memoryview(data))

    def _write_storage(self, name: str, lazy: LazyTensor) -> None:
        info = zipfile.ZipInfo(f"{_ROOT}/{name}")
        info.file_size = lazy.nbytes
        info.extra = _padding(self._file.tell() + _LOCAL_HEADER + len(info.filename) + _SIZES_FIELD)
        with self._archive.open(info, "w", force_zip64=True) as entry:
            tensor = lazy.read()
            if tuple(tensor.shape) != lazy.shape or tensor.dtype != lazy.dtype:
                raise ValueError(
                    f"{lazy.key} was declared with shape {lazy.shape} and {lazy.dtype}; "
                    f"it has {tuple(tensor.shape)} and {tensor.dtype}."
                )
            data = bytes_of(tensor.detach().contiguous())
            entry.write(data)
        self._record(name, data)

    def _record(self, name: str, data: memoryview) -> None:
        name = name.replace("/", ".")
        self.records[name] = FileRecord(name, data.nbytes, xxhash.xxh3_128_hexdigest(data), rank=0)

    def __exit__(self, *_: object) -> None:
        self._archive.close()


def _padding(start: int) -> bytes:
    """Return an extra field that aligns data which would otherwise begin at ``start``."""
    missing = -(start + len(_PADDING_FIELD) + 2) % _ALIGNMENT
    return _PADDING_FIELD + struct.pack("<H", missing) + bytes(missing)


@dataclass(frozen=True, eq=False)
class _Storage:
    """Placeholder of a tensor's storage during pickling."""

    kind: type
    index: int
    numel: int


class _TensorPickler(pickle.Pickler):
    """Pickler of tensors, lazy or not, in torch's form, with their data kept for later.

    Attributes:
        tensors: tensors to store, by key, in the order of the storage numbers.
    """

    def __init__(self, file: io.BytesIO, held: Held) -> None:
        super().__init__(file, protocol=2)
        self._held = held
        self.tensors: dict[str, LazyTensor] = {}
        self._storages: dict[str, _Storage] = {}
        self._typed = torch.storage._dtype_to_storage_type_map()

    def persistent_id(self, obj: Any) -> Any:
        """Return the reference to a storage."""
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, str(obj.index), "cpu", obj.numel)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a tensor to a view of its storage."""
        if isinstance(obj, Tensor) and not isinstance(obj, Parameter):  # which torch reduces to a tensor
            obj = self._in_memory(obj)
        if not isinstance(obj, LazyTensor):
            return NotImplemented
        strides = tuple(prod(obj.shape[dim + 1 :]) for dim in range(len(obj.shape)))
        arguments: tuple[Any, ...] = (self._storage(obj), 0, obj.shape, strides, False, OrderedDict())
        if obj.dtype in self._typed:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, obj.dtype)

    def _in_memory(self, tensor: Tensor) -> LazyTensor:
        # Pickle reduces each object once, so a running number is a unique key.
        own = LazyTensor(f"in memory {len(self.tensors)}", tuple(tensor.shape), tensor.dtype, tensor.detach().cpu)
        is_elsewhere = tensor.is_meta or hasattr(tensor, "__tensor_flatten__")  # of a pipeline, or a DTensor
        shared = None if is_elsewhere else self._held.get(tensor.data_ptr(), own)
        if shared is None:
            raise pickle.PicklingError(f"other ranks hold parts of a tensor of shape {own.shape} in it")
        return shared if (shared.shape, shared.dtype) == (own.shape, own.dtype) else own

    def _storage(self, lazy: LazyTensor) -> _Storage:
        if lazy.key not in self._storages:
            typed = self._typed.get(lazy.dtype)
            kind = getattr(torch, typed) if typed is not None else torch.storage.UntypedStorage
            numel = prod(lazy.shape) if typed is not None else lazy.nbytes
            self._storages[lazy.key] = _Storage(kind, len(self.tensors), numel)
            self.tensors[lazy.key] = lazy
        return self._storages[lazy.key]


def pickling_problem(value: Any, held: Held) -> str | None:
    """Return why a value cannot be pickled; ``None``: it can. Reads no tensors."""
    try:
        _TensorPickler(io.BytesIO(), held).dump(value)
    except Exception as error:  # objects raise any
        return f"{type(error).__name__}: {shortened(one_line(str(error)))}"
    return None


def check_torch_file(path: Path) -> None:
    """Raise :class:`CheckpointError` unless ``torch.load(weights_only=True)`` reads the file. Does not read tensors."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"torch.load(weights_only=True) refuses the written file: {error}") from error
