"""Collectives of flat tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed in torch 2.13, where the old names warn.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_parts(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather equally shaped tensors of a group, ``(size, *part.shape)``. A collective without gradient.

    Args:
        part: of the same shape on every rank.
        group: ``None``: all ranks.
    """
    part = part.contiguous()
    parts = part.new_empty(dist.get_world_size(group), *part.shape)
    all_gather(parts.view(-1), part.view(-1), group=group)  # gloo compares dim 0 of both
    return parts


def scatter_sum(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum ``rows``, ``(size, ...)``, over the group and return this rank's row. A collective without gradient."""
    rows = rows.contiguous()
    own = rows.new_empty(rows.shape[1:])
    reduce_scatter(own.view(-1), rows.view(-1), group=group)
    return own


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a tensor over the ranks as a new tensor. A collective without gradient."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
