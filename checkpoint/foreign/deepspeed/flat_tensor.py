"""A tensor whose values lie, flattened, in several pieces of other tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class FlatTensor:
    """A tensor that is put together when it is read.

    Args:
        shape: its shape.
        pieces: 1-dimensional tensors of one dtype, which one after the other hold its values, and perhaps padding after
            them; mostly views of files that are mapped from disk. None for a tensor without elements.
        dtype: its dtype, where no piece says it.

    Raises:
        ValueError: if the pieces hold fewer values than the shape has.
    """

    def __init__(self, shape: Sequence[int], pieces: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.shape = tuple(shape)
        self.dtype = pieces[0].dtype if pieces else dtype
        self._pieces = tuple(pieces)
        held = sum(piece.numel() for piece in pieces)
        if any(length < 0 for length in self.shape) or held < math.prod(self.shape):
            raise ValueError(f"a tensor of shape {self.shape} of which {held} values are there")

    @classmethod
    def whole(cls, tensor: Tensor) -> FlatTensor:
        """A tensor that is there in one piece."""
        return cls(tensor.shape, [tensor.reshape(-1)], tensor.dtype)

    def read(self, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """The box ``[offsets, offsets + sizes)``, contiguous, in memory of its own.

        Only the rows of the first tensor dimension that the box needs are read.

        Args:
            offsets: where the box begins in each tensor dimension; ``None``: at 0.
            sizes: its length in each tensor dimension; ``None``: to the end.
        """
        starts = tuple(offsets) if offsets is not None else (0,) * len(self.shape)
        lengths = tuple(sizes) if sizes is not None else tuple(n - at for n, at in zip(self.shape, starts, strict=True))
        if not self.shape:
            return self._values(0, 1).reshape(())
        row = math.prod(self.shape[1:])
        box = self._values(starts[0] * row, (starts[0] + lengths[0]) * row).reshape(lengths[0], *self.shape[1:])
        for dim in range(1, len(self.shape)):
            box = box.narrow(dim, starts[dim], lengths[dim])
        return box.contiguous()

    def _values(self, start: int, stop: int) -> Tensor:
        """The flattened values from ``start`` to ``stop``, copied."""
        values = torch.empty(stop - start, dtype=self.dtype)
        at = 0
        for piece in self._pieces:
            first, last = max(start, at), min(stop, at + piece.numel())
            if first < last:
                values[first - start : last - start] = piece[first - at : last - at]
            at += piece.numel()
        return values


def cut(flats: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
    """The pieces of flat tensors, thought of as one after the other, that hold ``length`` values from ``start`` on.

    Raises:
        ValueError: if they hold fewer.
    """
    pieces = []
    at = 0
    for flat in flats:
        first, last = max(start, at), min(start + length, at + flat.numel())
        if first < last:
            pieces.append(flat[first - at : last - at])
        at += flat.numel()
    if start + length > at:
        raise ValueError(f"{at} values where {start + length} are needed")
    return pieces
