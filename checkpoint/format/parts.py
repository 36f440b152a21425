"""A sharded tensor: the boxes of it that one rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

Part = tuple[tuple[int, ...], Tensor]


@dataclass(init=False, eq=False)
class TensorParts:
    """The part of a tensor on one rank: boxes of the whole, each a local tensor (mostly a view).

    It implements DCP's protocol of checkpointable objects, so ``torch.distributed.checkpoint`` loads into it as into
    any sharded tensor. Unlike a DTensor it may have several boxes, as ranks have of packed projections that are cut
    section by section.

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

    # ---- the protocol of torch.distributed.checkpoint ---------------------------------------------------------------

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), tensor.shape) for offsets, tensor in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.part_at(index.offset)
