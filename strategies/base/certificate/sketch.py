"""Random projections of gradients, to compare gradients with different sharding.

A gradient ``G`` of shape ``(r, c)`` is represented by ``U^T G V`` with random normal ``U (r, 2)`` and ``V (c, 4)``:
eight projections, each with expectation 0 and variance ``|G|^2`` (Johnson and Lindenstrauss, 1984). They are linear in
shards and replicas, so comparing a model takes one all-reduce of nine numbers per parameter and no full gradients.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.strategies.contract.cuts import Cut
from trainwright.strategies.state.placement import boxes_of

# Numbers per parameter: projections and the number of projected elements.
PROJECTIONS = 8
WIDTH = PROJECTIONS + 1
_FIRST, _LAST = 2, 4


def vectors_of(name: str, shape: Sequence[int]) -> list[Tensor]:
    """Return deterministic random normal matrices ``(length, k)``, one per dim of a tensor."""
    counts = [_FIRST, *[1] * (len(shape) - 2), _LAST] if len(shape) > 1 else [PROJECTIONS] * len(shape)
    # NumPy, since torch's draws are replaced while gradients are computed.
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return [
        torch.from_numpy(generator.standard_normal((length, count), dtype=np.float32))
        for length, count in zip(shape, counts, strict=True)
    ]


def sketch_of_whole(name: str, tensor: Tensor) -> Tensor:
    """Return the sketch of a whole tensor, float64 of shape ``(9,)`` on the CPU."""
    return _sketch(tensor, vectors_of(name, tensor.shape))


def sketch_of_part(name: str, shape: Sequence[int], held: Tensor, cut: Cut | None) -> Tensor:
    """Return the sketch of this rank's part of a tensor, float64 of shape ``(9,)`` on the CPU.

    Args:
        name: of the tensor.
        shape: of the whole.
        held: this rank's part; a DTensor if it is sharded over data ranks.
        cut: split along other axes; ``None``: none.
    """
    vectors = vectors_of(name, shape)
    if cut is not None:
        vectors[cut.dim] = _cut_rows(vectors[cut.dim], cut, len(shape))
    total = torch.zeros(WIDTH, dtype=torch.float64)
    parts: TensorParts = boxes_of(held)
    for offsets, box in parts.parts:
        rows = [v[o : o + n] for v, o, n in zip(vectors, offsets, box.shape, strict=True)]
        total += _sketch(box, rows)
    return total


def _cut_rows(vectors: Tensor, cut: Cut, dims: int) -> Tensor:
    """Return the rows of ``vectors`` for this rank's part of the split dim."""
    length, count = vectors.shape
    shape = [length if dim == cut.dim else 1 for dim in range(dims)]
    return cut.part(vectors.view(*shape, count)).reshape(-1, count)


def _sketch(tensor: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    result = torch.zeros(WIDTH, dtype=torch.float64)
    result[-1] = tensor.numel()
    if not tensor.numel():
        return result
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if tensor.is_complex():
        tensor = tensor.real + 2 * tensor.imag
    projected = tensor.unsqueeze(0)  # (projections so far, remaining dims)
    for vector in reversed(vectors):
        projected = (projected @ vector.to(tensor.device, tensor.dtype)).movedim(-1, 1).flatten(0, 1)
    flat = projected.reshape(-1).double().cpu()
    result[:PROJECTIONS] = flat if len(flat) == PROJECTIONS else flat.repeat(PROJECTIONS)[:PROJECTIONS]
    return result
