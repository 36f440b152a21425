"""Gathering of split tensors within a step, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainwright.strategies.contract.cuts import Cut


def gathered(tensor: DTensor) -> Tensor:
    """Return the whole of a split tensor, differentiably. A collective of its ranks."""
    return _MeanGradient.apply(tensor.full_tensor(), ranks_of(tensor))  # type: ignore[no-any-return]


def joined(part: Tensor, cut: Cut) -> Tensor:
    """Return the whole of a part, differentiably. A collective of the ranks that hold the others."""
    return _Joined.apply(part, cut)  # type: ignore[no-any-return]


def ranks_of(tensor: DTensor) -> list[dist.ProcessGroup]:
    """Return the groups of ranks over which a tensor is split."""
    placed = enumerate(tensor.placements)
    return [tensor.device_mesh.get_group(axis) for axis, placement in placed if not placement.is_replicate()]


def mean_over(tensor: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Return the mean of a tensor over groups of ranks, in new memory. A collective."""
    tensor = tensor.detach().contiguous().clone()
    for group in groups:
        dist.all_reduce(tensor, group=group)
        tensor /= group.size()
    return tensor


class _MeanGradient(torch.autograd.Function):
    """The identity, whose gradient is averaged over groups of ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, groups: list[dist.ProcessGroup]) -> Tensor:
        ctx.groups = groups
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return mean_over(gradient, ctx.groups), None


class _Joined(torch.autograd.Function):
    """Gathers a part; its gradient is this rank's part of the whole's, which all ranks have."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        return cut.whole(part.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.cut.part(gradient), None


def is_write(func: Any) -> bool:
    """Return whether a function of torch writes to an argument, by its name."""
    name = getattr(func, "__name__", "")
    return (
        name in ("__set__", "__setitem__")
        or (name.rstrip("_") != name and not name.startswith("__"))
        or name.startswith("__i")
    )
