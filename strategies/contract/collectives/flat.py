"""The collectives of flat tensors, by the names that the installed torch has for them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

# Named anew in torch 2.13; the old names still work there but warn.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_parts(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Equal tensors of all ranks of a group, ``(size, *part.shape)``. A collective without gradient.

    Args:
        part: of the same shape on every rank.
        group: ``None``: all ranks.
    """
    part = part.contiguous()
    parts = part.new_empty(dist.get_world_size(group), *part.shape)
    all_gather(parts.view(-1), part.view(-1), group=group)  # gloo compares dim 0 of both sides
    return parts


def scatter_sum(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's row of the sum of all ranks' ``rows``, ``(size, ...)``. A collective without gradient."""
    rows = rows.contiguous()
    own = rows.new_empty(rows.shape[1:])
    reduce_scatter(own.view(-1), rows.view(-1), group=group)
    return own


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of a tensor over the ranks, in memory of its own. A collective without gradient."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
