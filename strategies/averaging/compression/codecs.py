"""Lossy encodings of float rows as bytes: pure tensor functions on any device.

All rows of a call have the same length, which determines the number of bytes, so receivers know it beforehand.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Codec(ABC):
    """Encoding of rows of numbers."""

    @abstractmethod
    def row_bytes(self, length: int) -> int:
        """Bytes of an encoded row of ``length`` numbers."""

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Encode ``rows``, ``(rows, length)`` of float32, to ``(rows, row_bytes)`` of uint8."""

    @abstractmethod
    def decode(self, data: Tensor, length: int) -> Tensor:
        """Decode ``data``, ``(rows, row_bytes)`` of uint8, to ``(rows, length)`` of float32."""


class Cast(Codec):
    """Cast to another floating-point dtype.

    Args:
        dtype: ``torch.float32`` (lossless), ``torch.bfloat16``, or ``torch.float16``, clamped to ±65504.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def row_bytes(self, length: int) -> int:
        """See :class:`Codec`."""
        return length * self.dtype.itemsize

    def encode(self, rows: Tensor) -> Tensor:
        """See :class:`Codec`."""
        if self.dtype == torch.float16:
            # NaN and infinity stay, so that they are detected.
            largest = torch.finfo(self.dtype).max
            rows = torch.where(rows.isinf(), rows, rows.clamp(-largest, largest))
        return _as_bytes(rows.to(self.dtype, copy=True))  # a copy: the caller keeps using its rows

    def decode(self, data: Tensor, length: int) -> Tensor:
        """See :class:`Codec`."""
        return _from_bytes(data, self.dtype).float()


class Int8(Codec):
    """Eight bits per number and a float32 scale per block, which maps its largest magnitude to 127.

    Linear block-wise quantization as in 8-bit optimizers (arXiv:2110.02861, section 2.1).

    Args:
        block: numbers per scale, at least 1.
    """

    def __init__(self, block: int) -> None:
        self.block = block

    def row_bytes(self, length: int) -> int:
        """See :class:`Codec`."""
        return length + 4 * _num_blocks(length, self.block)

    def encode(self, rows: Tensor) -> Tensor:
        """See :class:`Codec`."""
        length = rows.shape[1]
        blocks = _in_blocks(rows, self.block)
        scales = blocks.abs().amax(-1) / 127
        # A zero block would divide by zero; a block with NaN or infinity has a non-finite scale and decodes to that.
        steps = torch.where(scales == 0, torch.ones_like(scales), scales)
        values = (blocks / steps[..., None]).nan_to_num(0.0, 127.0, -127.0).round_().clamp_(-127, 127).to(torch.int8)
        return torch.cat([_as_bytes(scales), _as_bytes(values.flatten(1)[:, :length])], 1)

    def decode(self, data: Tensor, length: int) -> Tensor:
        """See :class:`Codec`."""
        split = 4 * _num_blocks(length, self.block)
        scales = _from_bytes(data[:, :split], torch.float32)
        values = _in_blocks(_from_bytes(data[:, split:], torch.int8).float(), self.block)
        return (values * scales[..., None]).flatten(1)[:, :length]


class Sign(Codec):
    """One bit per number and a float32 scale per block: plus or minus the mean magnitude of the block.

    Scaled sign of error-feedback SGD (arXiv:1901.09847, section 4 and algorithm 3). Useful with error feedback only.

    Args:
        block: numbers per scale; a multiple of 8, since eight signs make a byte.
    """

    def __init__(self, block: int) -> None:
        self.block = block

    def row_bytes(self, length: int) -> int:
        """See :class:`Codec`."""
        return math.ceil(length / 8) + 4 * _num_blocks(length, self.block)

    def encode(self, rows: Tensor) -> Tensor:
        """See :class:`Codec`."""
        length = rows.shape[1]
        blocks = _in_blocks(rows, self.block)
        counts = torch.full(blocks.shape[1:2], float(self.block), device=rows.device)
        counts[-1] = length - self.block * (len(counts) - 1)  # without padding
        scales = blocks.abs().sum(-1) / counts
        bits = (blocks >= 0).flatten(1)[:, : 8 * math.ceil(length / 8)]
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=rows.device)
        packed = (bits.unflatten(1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)
        return torch.cat([_as_bytes(scales), packed], 1)

    def decode(self, data: Tensor, length: int) -> Tensor:
        """See :class:`Codec`."""
        split = 4 * _num_blocks(length, self.block)
        scales = _from_bytes(data[:, :split], torch.float32)
        shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
        bits = (data[:, split:, None] >> shifts) & 1
        signs = _in_blocks(bits.flatten(1)[:, :length].float() * 2 - 1, self.block)
        return (signs * scales[..., None]).flatten(1)[:, :length]


class TopK(Codec):
    """The numbers of largest magnitude and their indices; others become zero (arXiv:1712.01887).

    Args:
        ratio: fraction of numbers kept, above 0 and at most 1; at least one number is kept.
        values: codec of the kept numbers; default: float32.
    """

    def __init__(self, ratio: float, values: Codec | None = None) -> None:
        self.ratio = ratio
        self.values = values or Cast(torch.float32)

    def kept(self, length: int) -> int:
        """Return the number of elements kept of a row."""
        return min(length, max(1, round(self.ratio * length)))

    def row_bytes(self, length: int) -> int:
        """See :class:`Codec`."""
        return 4 * self.kept(length) + self.values.row_bytes(self.kept(length))

    def encode(self, rows: Tensor) -> Tensor:
        """See :class:`Codec`."""
        # NaN ranks as largest, so that it is sent and detected rather than kept in the residual.
        size = rows.abs().nan_to_num(float("inf"))
        places = size.topk(self.kept(rows.shape[1]), dim=1, sorted=False).indices.sort(1).values
        return torch.cat([_as_bytes(places.int()), self.values.encode(rows.gather(1, places))], 1)

    def decode(self, data: Tensor, length: int) -> Tensor:
        """See :class:`Codec`."""
        split = 4 * self.kept(length)
        places = _from_bytes(data[:, :split], torch.int32).long()
        values = self.values.decode(data[:, split:], self.kept(length))
        rows: Tensor = values.new_zeros(len(data), length)
        rows.scatter_(1, places, values)
        return rows


def _num_blocks(length: int, block: int) -> int:
    return -(-length // block)


def _in_blocks(rows: Tensor, block: int) -> Tensor:
    """Return ``(rows, length)`` as ``(rows, blocks, block)``, zero-padded."""
    missing = -rows.shape[1] % block
    padded: Tensor = torch.nn.functional.pad(rows, (0, missing))
    return padded.unflatten(1, (-1, block))  # type: ignore[no-any-return]


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def _from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    # Cloned: a view of another dtype needs aligned memory.
    return data.clone(memory_format=torch.contiguous_format).view(dtype)
