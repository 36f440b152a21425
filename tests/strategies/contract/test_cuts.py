from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.strategies.contract.cuts import Cut


def group_of(rank: int, size: int) -> Any:
    """A process group as one of its ranks sees it."""
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def box(whole: torch.Tensor, offsets: tuple[int, ...], tensor: torch.Tensor) -> torch.Tensor:
    return whole[tuple(slice(o, o + length) for o, length in zip(offsets, tensor.shape, strict=True))]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("shape", "dim", "sections"), [
    ((12,), 0, None), ((12, 4), 0, (6, 6)), ((4, 18), 1, (6, 12)), ((18, 5), 0, (6, 6, 6)), ((6, 2, 3), 0, None),
])  # fmt: skip
def test_boxes_of_all_ranks_cover_the_whole(size, shape, dim, sections):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    seen = torch.zeros(shape, dtype=torch.int64)
    for rank in range(size):
        cut = Cut(group=group_of(rank, size), dim=dim, sections=sections)
        part = cut.part(whole)
        for rows in sorted({1, 2, part.shape[0]}):  # the part may itself be split by rows over data ranks
            for first in range(0, part.shape[0], rows):
                piece = part[first : first + rows]
                held = TensorParts(part.shape, part.dtype, [((first, *[0] * (part.dim() - 1)), piece)])
                placed = cut.in_whole(held)
                assert placed.shape == shape
                for offsets, tensor in placed.parts:
                    assert torch.equal(box(whole, offsets, tensor), tensor)
                    if rows == part.shape[0]:
                        box(seen, offsets, tensor).add_(1)
                assert sum(tensor.numel() for _, tensor in placed.parts) == piece.numel()
    assert torch.equal(seen, torch.ones_like(seen))


def test_boxes_are_views():
    part = torch.zeros(6)
    for _, tensor in Cut(group=group_of(1, 2), sections=(8, 4)).in_whole(TensorParts.whole(part)).parts:
        tensor.fill_(1)
    assert part.eq(1).all()
