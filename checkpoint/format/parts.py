"""A sharded tensor: the boxes of it that one rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainwright.checkpoint.format.boxes import common

Part = tuple[tuple[int, ...], Tensor]


@dataclass(init=False, eq=False)
class TensorParts:
    """The part of a tensor on one rank: boxes of the whole, each a local tensor (mostly a view).

    Unlike a DTensor it may have several boxes, as ranks have of packed projections that are cut section by section.

    Args:
        shape: of the whole tensor.
        dtype: of the whole tensor.
        parts: pairs of offsets in the whole and the local tensor. Boxes of a rank do not overlap. Ranks may hold the
            same box; one of them writes it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Part]

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[Part]) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        # Empty boxes are dropped, unless the whole tensor is empty.
        self.parts = [(tuple(offsets), tensor) for offsets, tensor in parts if tensor.numel() or 0 in self.shape]

    @classmethod
    def whole(cls, tensor: Tensor) -> TensorParts:
        """Wrap a tensor that this rank holds whole."""
        return cls(tensor.shape, tensor.dtype, [((0,) * tensor.dim(), tensor)])

    @property
    def num_bytes(self) -> int:
        """Bytes of the boxes of this rank."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.parts)

    def map(self, function: Callable[[Tensor], Tensor]) -> TensorParts:
        """Return the same boxes with ``function`` applied to each local tensor; it must keep the shape."""
        return TensorParts(self.shape, self.dtype, [(offsets, function(tensor)) for offsets, tensor in self.parts])

    def part_at(self, offsets: Sequence[int] | None) -> Tensor:
        """Return the tensor of the box at ``offsets``.

        Raises:
            KeyError: if this rank has no such box.
        """
        for own, tensor in self.parts:
            if offsets is None or own == tuple(offsets):
                return tensor
        raise KeyError(f"no box at {tuple(offsets or ())}, only at {[own for own, _ in self.parts]}")


def copy_common(target: Part, source: Part) -> int:
    """Copy the overlap of two boxes; return its number of elements."""
    begin, sizes = common((target[0], target[1].shape), (source[0], source[1].shape))
    if 0 not in sizes:
        into, of = (
            tensor[tuple(slice(b - o, b - o + s) for b, o, s in zip(begin, offsets, sizes, strict=True))]
            for offsets, tensor in (target, source)
        )
        into.copy_(of)
    return math.prod(sizes)
