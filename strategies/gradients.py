"""Gradient norms and clipping over parameters that may be split across ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that this rank holds (itself if it is not split)."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """L2 norm of all gradients taken as one vector, equal on every rank.

    Plain gradients are taken as already averaged, hence the same on every rank. Sharded ones cost one all-reduce of a
    scalar per mesh axis that splits them.

    Args:
        parameters: those without a gradient are passed over.

    Returns:
        A scalar tensor; zero when there is no gradient.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(isinstance(g, DTensor) for g in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            axes = tuple(i for i, placement in enumerate(gradient.placements) if isinstance(placement, Shard))
            groups[gradient.device_mesh, axes].append(gradient._local_tensor)
        else:
            groups[None, ()].append(gradient)
    squares = [_sum_of_squares(tensors, mesh, axes) for (mesh, axes), tensors in groups.items()]
    return torch.stack(squares).sum().sqrt()


def _sum_of_squares(tensors: list[Tensor], mesh: DeviceMesh | None, axes: tuple[int, ...]) -> Tensor:
    total = torch.stack(torch._foreach_norm(tensors, 2.0)).float().square().sum()
    for axis in axes:
        assert mesh is not None
        dist.all_reduce(total, group=mesh.get_group(axis))
    return total


def clip_gradient_norm(parameters: Iterable[Tensor], max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
    """Scale all gradients in place so that their joint L2 norm is at most ``max_norm``.

    The result is that of ``torch.nn.utils.clip_grad_norm_`` on one process.

    Args:
        parameters: those without a gradient are passed over.
        max_norm: the largest norm allowed.
        error_if_nonfinite: raise instead of spreading NaN or infinity over all gradients.

    Returns:
        The norm before clipping.

    Raises:
        RuntimeError: if the norm is not finite and ``error_if_nonfinite`` is set (on every rank).
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = gradient_norm(parameters)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"The norm of the gradients is {norm.item()}, so they cannot be clipped to {max_norm}. "
            "Lower the learning rate, use precision='bf16-mixed' instead of '16-mixed', or set "
            "error_if_nonfinite=False to go on all the same."
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    locals_ = [local_tensor(p.grad) for p in parameters]  # type: ignore[arg-type]
    if locals_:
        torch._foreach_mul_(locals_, scale.to(locals_[0].device))
    return norm


def clip_gradient_value(parameters: Iterable[Tensor], max_value: float) -> None:
    """Clamp every element of every gradient in place to ``[-max_value, max_value]``."""
    locals_ = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if locals_:
        torch._foreach_clamp_min_(locals_, -max_value)
        torch._foreach_clamp_max_(locals_, max_value)
