"""Differentiable collectives of the parts of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.context.order import SequenceOrder
from trainwright.strategies.contract.collectives.differentiable import LinearMap, linear
from trainwright.strategies.contract.collectives.flat import gather_parts, scatter_sum, summed

Group = dist.ProcessGroup


def make_whole(part: Tensor, group: Group, order: SequenceOrder, dim: int) -> Tensor:
    """Gather the whole sequence on every rank; the gradient is this rank's rows times the number of ranks."""
    return linear(part, _joining(group, order, dim), lambda grad: order.part(grad, dim) * order.size)


def gather_all(part: Tensor, group: Group, order: SequenceOrder, dim: int) -> Tensor:
    """Gather the whole sequence on every rank; backward sums the gradients of all ranks for this rank's part."""

    def backward(grad: Tensor) -> Tensor:
        return scatter_sum(torch.stack([order.part(grad, dim, rank) for rank in range(order.size)]), group)

    return linear(part, _joining(group, order, dim), backward)


def _joining(group: Group, order: SequenceOrder, dim: int) -> Callable[[Tensor], Tensor]:
    return lambda part: order.whole(gather_parts(part, group).unbind(), dim)


def sum_alike(part: Tensor, group: Group) -> Tensor:
    """Sum over the ranks; the gradient is that of the sum times the number of ranks, as for :func:`make_whole`."""
    return linear(part, lambda part: summed(part, group), lambda grad: grad * group.size())


def to_heads(group: Group, order: SequenceOrder, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert ``(B, H, S, d)`` to ``(B, H / c, T, d)`` by one all-to-all for all tensors."""

    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        sent = [tensor.unflatten(1, (order.size, -1)).movedim(1, 0) for tensor in tensors]
        return tuple(order.whole(part.unbind(), 2) for part in _exchanged(sent, group))

    return cast(
        tuple[Tensor, ...], LinearMap.apply(forward, lambda *grads: to_positions(group, order, *grads), *tensors)
    )


def to_positions(group: Group, order: SequenceOrder, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert ``(B, H / c, T, d)`` to ``(B, H, S, d)`` by one all-to-all for all tensors."""

    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        sent = [torch.stack([order.part(tensor, 2, rank) for rank in range(order.size)]) for tensor in tensors]
        return tuple(part.movedim(0, 1).flatten(1, 2) for part in _exchanged(sent, group))

    return cast(tuple[Tensor, ...], LinearMap.apply(forward, lambda *grads: to_heads(group, order, *grads), *tensors))


def _exchanged(sent: list[Tensor], group: Group) -> list[Tensor]:
    """Send row ``r`` of each tensor to rank ``r``; row ``r`` of each result is from rank ``r``."""
    packed = torch.cat([tensor.flatten(1) for tensor in sent], 1)
    arrived = torch.empty_like(packed)
    dist.all_to_all_single(arrived, packed, group=group)
    pieces = arrived.split([tensor[0].numel() for tensor in sent], 1)
    return [piece.unflatten(1, tensor.shape[1:]) for piece, tensor in zip(pieces, sent, strict=True)]
