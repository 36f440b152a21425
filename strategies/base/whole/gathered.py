"""Gathering of split tensors within a step, with gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def gathered(tensor: DTensor) -> Tensor:
    """Return the whole of a split tensor, differentiably. A collective of its ranks."""
    mesh = tensor.device_mesh
    groups = [mesh.get_group(axis) for axis, placed in enumerate(tensor.placements) if not placed.is_replicate()]
    whole: Tensor = _MeanGradient.apply(tensor.full_tensor(), groups)
    return whole


class _MeanGradient(torch.autograd.Function):
    """The identity, whose gradient is averaged over groups of ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, groups: list[dist.ProcessGroup]) -> Tensor:
        ctx.groups = groups
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gradient = gradient.contiguous().clone()
        for group in ctx.groups:
            dist.all_reduce(gradient, group=group)
            gradient /= group.size()
        return gradient, None


def is_write(func: Any) -> bool:
    """Return whether a function of torch writes to an argument, by its name."""
    name = getattr(func, "__name__", "")
    return name == "__set__" or name.rstrip("_") != name and not name.startswith("__") or name.startswith("__i")
