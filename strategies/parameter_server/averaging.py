"""Buffers that differ from rank to rank, brought to one value."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


@torch.no_grad()
def average_buffers(module: nn.Module) -> None:
    """Average floating-point buffers over all ranks and take others from the first; a collective.

    What is the same on all ranks stays as it is, to the bit.
    """
    if dist.get_world_size() == 1:
        return
    for buffer in module.buffers():
        if buffer.is_meta or not buffer.numel():
            continue
        first = buffer.clone()
        dist.broadcast(first, 0)
        if buffer.is_floating_point():
            # Not the plain mean: that of three equal numbers may be another one. Nor infinity minus infinity.
            apart = torch.where(buffer == first, 0.0, buffer - first)
            dist.all_reduce(apart)
            first += apart / dist.get_world_size()
        buffer.copy_(first)
