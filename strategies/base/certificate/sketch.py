"""Random projections of gradients and weights, to compare tensors with different sharding.

A gradient ``G`` of shape ``(r, c)`` is represented by ``U^T G V`` with random normal ``U (r, 2)`` and ``V (c, 4)``:
eight projections, each with expectation 0 and variance ``|G|^2`` (Johnson and Lindenstrauss, 1984). They are linear in
shards and replicas, so comparing a model takes one all-reduce of nine numbers per parameter and no full gradients.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.strategies.base.certificate.written import AsWritten
from trainwright.strategies.contract.cuts import Cut
from trainwright.strategies.state.placement import boxes_of

# Numbers per parameter: projections and the number of projected elements.
PROJECTIONS = 8
WIDTH = PROJECTIONS + 1
_FIRST, _LAST = 2, 4
# Difference of weights relative to their norm; they are copied, or rounded to at least 8 bits of precision.
_ALLOWED = 2e-2


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


def sketches_of_wholes(written: AsWritten) -> Tensor:
    """Return sketches of all parameters before sharding, ``(parameters, 9)``."""
    rows = [sketch_of_whole(each.name, getattr(*each.slots[0])) for each in written.parameters]
    return torch.stack(rows) if rows else torch.zeros(0, WIDTH, dtype=torch.float64)


def parts_that_differ(strategy: Any, written: AsWritten, wholes: Tensor) -> str:
    """Return the first parameter whose shards differ from the first rank's weights; empty: none. A collective.

    Args:
        strategy: set up.
        written: of its module.
        wholes: from :func:`sketches_of_wholes` on this rank.
    """
    assembly, _ = strategy.certified.parts()
    parts = torch.zeros_like(wholes)
    for row, each in enumerate(written.parameters):
        held = strategy.certified.held(each.name)
        if held is not None:
            parts[row] = sketch_of_part(each.name, each.shape, held, assembly.cuts.get(each.name))
    wholes, parts = wholes.to(strategy.root_device), parts.to(strategy.root_device)
    dist.broadcast(wholes, src=0)
    dist.all_reduce(parts)
    wholes, parts = wholes.cpu(), parts.cpu()
    copies = (parts[:, -1] / wholes[:, -1].clamp(min=1)).clamp(min=1e-9)
    distances = (parts[:, :PROJECTIONS] / copies[:, None] - wholes[:, :PROJECTIONS]).square().mean(1).sqrt()
    norms = wholes[:, :PROJECTIONS].square().mean(1).sqrt()
    wrong = [i for i, excess in enumerate((distances - _ALLOWED * norms - 1e-6).tolist()) if excess > 0]
    return written.parameters[wrong[0]].name if wrong else ""
