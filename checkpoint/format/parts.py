"""A tensor of which one rank holds some boxes, and how those boxes lie in the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

Part = tuple[tuple[int, ...], Tensor]


@dataclass(init=False, eq=False)
class TensorParts:
    """What one rank holds of a tensor: boxes of the whole, each a tensor (mostly a view) of this rank's.

    It speaks DCP's protocol of checkpointable objects, so a planner of ``torch.distributed.checkpoint``
    loads into it as into any sharded tensor. A DTensor could not say it all: a packed projection that is cut section by
    section leaves a rank with several boxes.

    Args:
        shape: of the whole tensor.
        dtype: of the whole tensor.
        parts: pairs of the offsets of a box in the whole and the tensor that holds it. Boxes do not overlap. Ranks may
            hold the same box: then one of them writes it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Part]

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[Part]) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        # A box without elements is written by nobody, unless the whole tensor has none.
        self.parts = [(tuple(offsets), tensor) for offsets, tensor in parts if tensor.numel() or 0 in self.shape]

    @classmethod
    def whole(cls, tensor: Tensor) -> TensorParts:
        """A tensor that this rank holds whole."""
        return cls(tensor.shape, tensor.dtype, [((0,) * tensor.dim(), tensor)])

    @property
    def num_bytes(self) -> int:
        """Bytes of the boxes of this rank."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.parts)

    def map(self, function: Callable[[Tensor], Tensor]) -> TensorParts:
        """The same boxes of tensors that ``function`` makes of this rank's, of the same shapes."""
        return TensorParts(self.shape, self.dtype, [(offsets, function(tensor)) for offsets, tensor in self.parts])

    def part_at(self, offsets: Sequence[int] | None) -> Tensor:
        """The tensor of the box at ``offsets``.

        Raises:
            KeyError: if this rank holds no such box.
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
