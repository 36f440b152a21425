"""Gradient norms and clipping over parameters that may be split across ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from trainwright.strategies.contract.groups import sum_over


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of ``tensor``; the tensor itself if it is not a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class GradientScope:
    """Ranks over which gradients are split, besides the meshes of DTensors.

    Args:
        groups_of: process groups over which the gradient of a parameter is split.
        counts: ``False`` for a replica that another rank of ``group`` counts.
        group: ranks that hold different parameters; ``None``: every rank has all of them.
    """

    groups_of: Callable[[Tensor], tuple[dist.ProcessGroup, ...]]
    counts: Callable[[Tensor], bool]
    group: dist.ProcessGroup | None


def gradient_norm(parameters: Iterable[Tensor], scope: GradientScope | None = None) -> Tensor:
    """Return the global L2 norm of all gradients, equal on every rank.

    Plain gradients are assumed to be averaged already. Sharded ones cost one all-reduce of a scalar per mesh axis.

    Args:
        parameters: those without a gradient are skipped.
        scope: further groups over which gradients are split; ``None``: only the meshes of DTensors.

    Returns:
        A scalar tensor; zero when there is no gradient.
    """
    with_gradient = [p for p in parameters if p.grad is not None]
    if scope is None and not any(isinstance(p.grad, DTensor) for p in with_gradient):
        return torch.nn.utils.get_total_norm([p.grad for p in with_gradient])  # type: ignore[misc]
    groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in with_gradient:
        if scope is None or scope.counts(parameter):
            groups[_split_over(parameter, scope)].append(local_tensor(parameter.grad))  # type: ignore[arg-type]
    squares = [_sum_of_squares(tensors, over) for over, tensors in groups.items()]
    # Offloaded gradients are on a different device.
    total = torch.stack([each.to(squares[0].device) for each in squares]).sum() if squares else torch.zeros(())
    if scope is not None and scope.group is not None:
        total = sum_over(scope.group, total)
    return total.sqrt()


def _split_over(parameter: Tensor, scope: GradientScope | None) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups over which the gradient of ``parameter`` is split."""
    gradient, groups = parameter.grad, scope.groups_of(parameter) if scope is not None else ()
    if isinstance(gradient, DTensor):
        mesh = gradient.device_mesh
        axes = (i for i, placement in enumerate(gradient.placements) if isinstance(placement, Shard))
        groups = (*groups, *(mesh.get_group(axis) for axis in axes))
    return groups


def squares_by_block(
    tensors: Iterable[tuple[str, Tensor]], blocks: Sequence[str], parts_of: Callable[[str], int], device: torch.device
) -> Tensor:
    """Return this rank's contribution to squared L2 norms per block; their sum over the world is that of full tensors.

    Replicas count an equal fraction each, so one all-reduce over the world suffices for any sharding. No communication
    and no device synchronization happens here.

    Args:
        tensors: parameters or gradients by the names of the parameters.
        blocks: names of modules; nested ones count for the innermost.
        parts_of: number of shards of a parameter, besides the mesh of a DTensor; 0: another rank counts it.
        device: of the result.

    Returns:
        ``(blocks + 1,)`` in the dtype of :func:`widest`; the last element is for parameters outside of all blocks.
    """
    by_weight: dict[tuple[int, torch.device], list[tuple[int, Tensor]]] = defaultdict(list)
    place = {name: index for index, name in enumerate(blocks)}
    for name, tensor in tensors:
        local, parts = local_tensor(tensor.detach()), parts_of(name) * _parts_on_mesh(tensor)
        if parts and local.numel():
            values = local.coalesce().values() if local.is_sparse else local
            by_weight[parts, local.device].append((_block_of(name, place), values))
    total = torch.zeros(len(blocks) + 1, dtype=widest(device), device=device)
    world = dist.get_world_size() if dist.is_initialized() else 1
    for (parts, where), found in by_weight.items():
        norms = torch.stack(torch._foreach_norm([each for _, each in found], 2.0, dtype=torch.float32))
        index = torch.tensor([block for block, _ in found], device=where)
        squares = torch.zeros(len(total), dtype=widest(where), device=where)
        squares.index_add_(0, index, norms.to(squares.dtype).square())
        total += squares.to(device) * (parts / world)
    return total


def widest(device: torch.device) -> torch.dtype:
    """Return the dtype for sums on a device: float64, or float32 on Apple GPUs, which do not support float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _parts_on_mesh(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 1
    mesh, placements = tensor.device_mesh, tensor.placements
    return math.prod(mesh.size(axis) for axis, each in enumerate(placements) if isinstance(each, Shard))


def _block_of(name: str, place: Mapping[str, int]) -> int:
    """Return the index of the block of a parameter; ``len(place)`` if it is in none."""
    owner = name.rpartition(".")[0]
    while owner and owner not in place:
        owner = owner.rpartition(".")[0]
    return place.get(owner, len(place))


def _sum_of_squares(tensors: list[Tensor], groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
    total = torch.stack(torch._foreach_norm(tensors, 2.0)).float().square().sum()
    for group in groups:
        total = sum_over(group, total)
    return total


def clip_gradient_norm(
    parameters: Iterable[Tensor], max_norm: float, error_if_nonfinite: bool = False, scope: GradientScope | None = None
) -> Tensor:
    """Scale all gradients in place so that their global L2 norm is at most ``max_norm``.

    Equals ``torch.nn.utils.clip_grad_norm_`` on one process.

    Args:
        parameters: those without a gradient are skipped.
        max_norm: the largest norm allowed.
        error_if_nonfinite: raise instead of scaling by NaN or infinity.
        scope: as in :func:`gradient_norm`.

    Returns:
        The norm before clipping.

    Raises:
        RuntimeError: if the norm is not finite and ``error_if_nonfinite`` is set (on every rank).
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = gradient_norm(parameters, scope)
    if error_if_nonfinite:
        refuse_nonfinite(float(norm), max_norm)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)  # some may be offloaded
    for parameter in parameters:
        local = local_tensor(parameter.grad)  # type: ignore[arg-type]
        by_device[local.device].append(local)
    for device, locals_ in by_device.items():
        torch._foreach_mul_(locals_, scale.to(device))
    return norm


def sum_gradients(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each gradient by the sum over a group, with one all-reduce per dtype. A collective of the group.

    Where this rank has no gradient, because its layers do not use the parameter, it gets that of the others.

    Args:
        parameters: the same on all ranks.
        group: of the ranks.
    """
    for dtype in dict.fromkeys(each.dtype for each in parameters):
        _sum_gradients([each for each in parameters if each.dtype == dtype], group)


def _sum_gradients(parameters: list[Tensor], group: dist.ProcessGroup) -> None:
    for each in parameters:
        if each.grad is not None and each.grad.is_sparse:
            each.grad = each.grad.to_dense()
    has = [each.grad is not None for each in parameters]
    parts = [local_tensor(each.detach() if each.grad is None else each.grad) for each in parameters]
    pieces = [part if own else torch.zeros_like(part) for part, own in zip(parts, has, strict=True)]
    pieces.append(parts[0].new_tensor(has))
    *sums, holders = sum_over(group, torch.cat([p.reshape(-1) for p in pieces])).split([p.numel() for p in pieces])
    # Read from the device only if this rank may have to follow others.
    counts = has if all(has) else holders.tolist()
    for each, total, count in zip(parameters, sums, counts, strict=True):
        if count:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
            part = local_tensor(each.grad)
            part.copy_(total.view(part.shape))


def refuse_nonfinite(norm: float, max_norm: float) -> None:
    """Raise a ``RuntimeError`` if ``norm`` is not finite."""
    if not math.isfinite(norm):
        raise RuntimeError(
            f"The norm of the gradients is {norm}, so they cannot be clipped to {max_norm}. Lower the learning rate, "
            "use precision='bf16-mixed' instead of '16-mixed', or set error_if_nonfinite=False to continue anyway."
        )


def clip_gradient_value(parameters: Iterable[Tensor], max_value: float) -> None:
    """Clamp every element of every gradient in place to ``[-max_value, max_value]``."""
    locals_ = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if locals_:
        torch._foreach_clamp_min_(locals_, -max_value)
        torch._foreach_clamp_max_(locals_, max_value)
