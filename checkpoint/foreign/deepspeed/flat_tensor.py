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

    def read(self) -> Tensor:
        """Return the tensor, contiguous, in memory of its own."""
        if not self._pieces:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.cat(self._pieces)[: math.prod(self.shape)].reshape(self.shape).to(self.dtype)


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
