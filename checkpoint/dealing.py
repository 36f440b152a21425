"""Which rank writes what several hold, settled before anything is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from trainwright.checkpoint.parts import TensorParts

Box = tuple[str, tuple[int, ...], tuple[int, ...], int]
"""Key of the tensor, offsets and sizes of the box, bytes."""


class Dealer:
    """Leaves each rank those of its boxes that it shall write, so that nobody copies what another one writes.

    Where all ranks hold the same (data parallel training), each then copies a part only. Who holds what seldom changes
    during a run, so the deal is kept, and the ranks agree by one number that it still holds.

    Args:
        group: a gloo group of all ranks; ``None``: this process alone, which keeps everything.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._boxes: list[Box] | None = None
        self._own: frozenset[int] = frozenset()

    def deal(self, tensors: Mapping[str, TensorParts]) -> dict[str, TensorParts]:
        """The boxes of ``tensors`` that this rank shall write. A collective."""
        if self._group is None or dist.get_world_size(self._group) == 1:
            return dict(tensors)
        boxes = boxes_of(tensors)
        changed = torch.tensor(int(boxes != self._boxes))
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self._group)
        if changed:
            self._own = frozenset(self._agree(boxes))
            self._boxes = boxes
        return _keep(tensors, self._own)

    def _agree(self, boxes: list[Box]) -> list[int]:
        group = self._group
        assert group is not None
        ranks, first = dist.get_world_size(group), dist.get_global_rank(group, 0)
        is_first = dist.get_rank(group) == 0
        held: list[list[Box] | None] | None = [None] * ranks if is_first else None
        dist.gather_object(boxes, held, dst=first, group=group)
        shares: list[list[int]] | None = share_out([b or [] for b in held]) if held is not None else None
        own: list[list[int] | None] = [None]
        dist.scatter_object_list(own, shares, src=first, group=group)
        assert own[0] is not None
        return own[0]


def boxes_of(tensors: Mapping[str, TensorParts]) -> list[Box]:
    """The boxes of a rank, in order."""
    return [
        (key, tuple(offsets), tuple(box.shape), box.numel() * box.element_size())
        for key, parts in tensors.items()
        for offsets, box in parts.parts
    ]


def share_out(held: Sequence[Sequence[Box]]) -> list[list[int]]:
    """Give each box to one of the ranks that hold it, so that ranks write about as many bytes.

    The largest boxes are given first, each to the holder that has least so far.

    Args:
        held: the boxes of each rank.

    Returns:
        For each rank the positions of the boxes that it got.
    """
    holders: dict[Box, list[tuple[int, int]]] = {}
    for rank, boxes in enumerate(held):
        for position, box in enumerate(boxes):
            holders.setdefault(box, []).append((rank, position))
    shares: list[list[int]] = [[] for _ in held]
    load = [0] * len(held)
    # Boxes that only one rank holds leave nothing to choose; they count before the others are dealt.
    for box in sorted(holders, key=lambda box: (len(holders[box]) > 1, -box[3], box)):
        rank, position = min(holders[box], key=lambda place: (load[place[0]], place[0]))
        shares[rank].append(position)
        load[rank] += box[3]
    return [sorted(share) for share in shares]


def _keep(tensors: Mapping[str, TensorParts], positions: frozenset[int]) -> dict[str, TensorParts]:
    kept, position = {}, 0
    for key, parts in tensors.items():
        own = []
        for part in parts.parts:
            if position in positions:
                own.append(part)
            position += 1
        if own:
            kept[key] = TensorParts(parts.shape, parts.dtype, own)
    return kept
