"""Streaming reader and writer of the safetensors format: one tensor at a time, without a second copy.

A file consists of the header's length (8 bytes, little endian), the header (JSON: dtype, shape and position of each
tensor), and the tensors' bytes without gaps. It is compatible with other safetensors implementations; in addition, it
reads boxes of tensors from any seekable file, and writes to files that cannot seek.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from trainwright.checkpoint.format.boxes import extent_of, is_within
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import ContentError, interpreting, naturals, parse_json, shape_of
from trainwright.core.text.printable import shortened

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""The format's names of dtypes."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_LONGEST_HEADER = 100_000_000  # the format's own limit
_BLOCK = 16 << 20
# Below this many bytes, reading through a gap is faster than seeking.
_WORTH_SEEKING = 1 << 18


class Writable(Protocol):
    """An output for a tensor file."""

    def write(self, data: memoryview, /) -> object:
        """Append all of ``data``."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFileWriter:
    """Writer of tensors one after another, with at most one of them in host memory.

    Args:
        file: has ``write``; need not seek. It stays open.
        entries: all tensors, in the order of writing.
        metadata: texts for the header, e.g. ``{"format": "pt"}``.

    Raises:
        CheckpointError: if the format cannot hold an entry.
    """

    def __init__(
        self, file: Writable, entries: Sequence[TensorEntry], metadata: Mapping[str, str] | None = None
    ) -> None:
        self._file = file
        self._entries = tuple(entries)
        self._next = 0
        header = _header(self._entries, metadata or {})
        self.num_bytes = len(header) + sum(entry.num_bytes for entry in self._entries)
        """Bytes of the whole file."""
        file.write(memoryview(header))

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor.

        Args:
            name: of the next entry.
            tensor: of its dtype and shape, on any device and with any strides. Contiguous CPU tensors are written in
                place, others through a buffer of some MiB.

        Raises:
            ValueError: if it is not the next entry or does not match it.
        """
        if self._next == len(self._entries):
            raise ValueError(f"All {self._next} tensors are written; {name!r} is not one of them.")
        entry = self._entries[self._next]
        if name != entry.name:
            raise ValueError(
                f"The next tensor to write is {entry.name!r}, not {name!r}: write in the order of entries."
            )
        if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
            raise ValueError(
                f"{name!r} was announced as {entry.dtype} of shape {entry.shape}, and is {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}."
            )
        for block in _blocks(tensor.detach()):
            self._file.write(bytes_of(block))
        self._next += 1

    def close(self) -> None:
        """Check that all tensors were written; the file itself stays open.

        Raises:
            ValueError: if one was not.
        """
        if self._next < len(self._entries):
            raise ValueError(
                f"{len(self._entries) - self._next} tensors are missing, first {self._entries[self._next].name!r}."
            )


class TensorFileReader(AbstractContextManager["TensorFileReader"]):
    """Reader of tensors, or boxes of them, whose header is checked against itself and the file size first.

    For one thread at a time, since a file has one position. A context manager that closes the file.

    Args:
        open: opens the file for reading; it must be seekable.
        only: the one tensor of a file of raw bytes without a header; ``None``: a safetensors file.

    Raises:
        CheckpointError: if the file is malformed.
    """

    def __init__(self, open: Callable[[], BinaryIO], only: TensorEntry | None = None) -> None:
        self._open = open
        self._file: BinaryIO | None = open()
        if only is not None:
            self.entries, self.metadata, self._begins = {only.name: only}, {}, {only.name: 0}
            return
        try:
            self.entries, self.metadata, self._begins = _read_header(self._file)
        except BaseException:
            self.close()
            raise

    entries: dict[str, TensorEntry]
    """Tensors by name, in the order of the file."""
    metadata: dict[str, str]
    """Texts of the header."""

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return the box ``[offsets, offsets + sizes)`` of a tensor as a new contiguous CPU tensor.

        Args:
            name: of the tensor.
            offsets: begin of the box in each dim; ``None``: 0.
            sizes: of the box in each dim; ``None``: to the end. A box that is narrower in the first dim only is read
                without extra bytes.

        Raises:
            KeyError: if there is no such tensor.
            ValueError: if the box is not within it.
            CheckpointError: if the file ends too early or cannot be read.
        """
        entry = self.entries[name]
        offsets, sizes = extent_of(entry.shape, offsets, sizes)
        if not is_within(offsets, sizes, entry.shape):
            raise ValueError(f"{name!r} of shape {entry.shape} has no box at {offsets} of {sizes}.")
        # A scalar is read as a row of one.
        out = torch.empty(sizes or (1,), dtype=entry.dtype)
        if out.numel():
            if self._file is None:
                self._file = self._open()
            _fill(out, self._file, name, self._begins[name], entry.shape or (1,), offsets or (0,))
        return out.reshape(sizes)

    def close(self) -> None:
        """Close the file; the next :meth:`read` reopens it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __exit__(self, *_: object) -> None:
        self.close()


def _fill(out: Tensor, file: BinaryIO, name: str, begin: int, shape: Sequence[int], offsets: Sequence[int]) -> None:
    """Fill ``out``, a box at ``offsets`` of the tensor of ``shape`` whose bytes start at ``begin``."""
    row = math.prod(shape[1:]) * out.element_size()
    begin += offsets[0] * row
    if tuple(out.shape[1:]) == tuple(shape[1:]):
        _read_into(out, file, name, begin)
    elif row >= _WORTH_SEEKING:
        for index in range(out.shape[0]):
            _fill(out[index], file, name, begin + index * row, shape[1:], offsets[1:])
    else:
        inside = tuple(slice(o, o + s) for o, s in zip(offsets[1:], out.shape[1:], strict=True))
        count = max(1, _BLOCK // row)
        for first in range(0, out.shape[0], count):
            part = out[first : first + count]
            rows = torch.empty((part.shape[0], *shape[1:]), dtype=out.dtype)
            _read_into(rows, file, name, begin + first * row)
            part.copy_(rows[(slice(None), *inside)])


def _read_into(out: Tensor, file: BinaryIO, name: str, begin: int) -> None:
    view = bytes_of(out)
    file.seek(begin)
    done = 0
    while done < view.nbytes:
        got = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not got:
            raise CheckpointError(f"{_place(file)}: truncated: {view.nbytes - done} bytes of {name!r} are missing.")
        done += got


# ---- the header -----------------------------------------------------------------------------------------------------


def _header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    content: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    begin = 0
    for entry in entries:
        if entry.name in content or entry.name == _METADATA:
            raise CheckpointError(
                f"A tensor file cannot hold two tensors named {entry.name!r}, nor one named {_METADATA!r}."
            )
        if entry.dtype not in _CODES:
            raise CheckpointError(
                f"{entry.name!r} is {entry.dtype}, which the safetensors format does not have. It has: "
                f"{', '.join(str(dtype) for dtype in _CODES)}."
            )
        end = begin + entry.num_bytes
        content[entry.name] = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    # Padding, so that tensors in a memory-mapped file are aligned to 8 bytes.
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _LONGEST_HEADER:
        raise CheckpointError(
            f"{len(entries)} tensors are too many for one file: their header takes {len(text)} bytes."
        )
    return _LENGTH.pack(len(text)) + text


def _read_header(file: BinaryIO) -> tuple[dict[str, TensorEntry], dict[str, str], dict[str, int]]:
    """Return entries, metadata and the file position of each tensor."""
    size = file.seek(0, 2)
    file.seek(0)
    with interpreting(_place(file), problem="is not a complete safetensors file"):
        return _parsed(file, size)


def _parsed(file: BinaryIO, size: int) -> tuple[dict[str, TensorEntry], dict[str, str], dict[str, int]]:
    start = file.read(_LENGTH.size)
    length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else -1
    data_begin = _LENGTH.size + length
    if not 2 <= length <= _LONGEST_HEADER or data_begin > size:
        raise ContentError(f"it has {size} bytes, and its header should have {length}")
    content = parse_json(file.read(length))
    if not isinstance(content, dict):
        raise ContentError("its header is not a JSON object")
    metadata = content.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ContentError(f"its {_METADATA} is not a mapping of texts")
    places = {name: _entry(name, value) for name, value in content.items()}
    end = 0
    entries, begins = {}, {}
    for name, (entry, begin) in sorted(places.items(), key=lambda item: (item[1][1], item[1][0].num_bytes)):
        if begin != end:
            raise ContentError(f"{name!r} begins at {begin}, and the tensor before it ends at {end}")
        entries[name], begins[name], end = entry, data_begin + begin, begin + entry.num_bytes
    if data_begin + end != size:
        raise ContentError(f"it has {size} bytes, and its header describes {data_begin + end}")
    return entries, metadata, begins


def _entry(name: str, value: object) -> tuple[TensorEntry, int]:
    """Return a tensor's entry and position."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ContentError(f"{name!r} is described by {shortened(repr(value))}")
    dtype, shape, place = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        given = shortened(repr(dtype))
        raise ContentError(f"{name!r} has the unknown dtype {given}; known are {', '.join(DTYPES)}")
    try:
        entry, (begin, end) = TensorEntry(name, DTYPES[dtype], shape_of(shape)), naturals(place)
    except ValueError:
        raise ContentError(
            f"{name!r} has the shape {shortened(repr(shape))} and the position {shortened(repr(place))}"
        ) from None
    if end - begin != entry.num_bytes:
        raise ContentError(f"{name!r} needs {entry.num_bytes} bytes, and has the position {place}")
    return entry, begin


# ---- tensors and bytes ----------------------------------------------------------------------------------------------


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield contiguous CPU pieces that make up a tensor, of some MiB each where copying is needed."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield tensor
        return
    size = tensor.numel() * tensor.element_size()
    if size <= _BLOCK or tensor.dim() == 0:
        yield tensor.cpu().contiguous()
        return
    count = max(1, _BLOCK * tensor.shape[0] // size)
    for first in range(0, tensor.shape[0], count):
        rows = tensor[first : first + count]
        # A single large row is cut along the next dim.
        yield from _blocks(rows[0] if count == 1 else rows)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor of any dtype."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _place(file: BinaryIO) -> str:
    return str(getattr(file, "name", "The file"))
