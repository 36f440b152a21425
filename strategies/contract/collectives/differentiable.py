"""Differentiable collectives over one axis of the mesh, for engines that split a module's computation.

Every function takes and returns plain tensors and is a linear map; its backward is the map that makes the gradient of
the *sum of one replica's losses* right, see the table. They are their own derivatives' derivatives, so a backward
through a backward works. In a group of one rank each returns its input.

================  ====================================  =========================================
function          forward                               backward
================  ====================================  =========================================
copy_to           the input                             sum over the ranks
reduce_from       sum over the ranks                    the gradient
gather            ranks' inputs joined along ``dim``    sum over the ranks, then this rank's slice
gather_same       ranks' inputs joined along ``dim``    this rank's slice
scatter           this rank's slice along ``dim``       ranks' gradients joined along ``dim``
reduce_scatter    sum, then this rank's slice           ranks' gradients joined along ``dim``
all_to_all        rows to the ranks that own them       rows back to where they came from
================  ====================================  =========================================

``copy_to`` and ``reduce_from`` are *f* and *g* of Megatron-LM (arXiv:1909.08053, section 3); ``gather`` and
``reduce_scatter`` are those of its sequence parallelism (arXiv:2205.05198, section 4.2). Which of the two backwards of
``gather`` is right depends on what follows: ``gather`` where the ranks go on to compute different things with the
whole, ``gather_same`` where all compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from trainwright.strategies.contract.collectives import flat as flat_collectives

Group = dist.ProcessGroup


def copy_to(x: Tensor, group: Group) -> Tensor:
    """The input; backward sums the gradients of all ranks (Megatron's *f*).

    For a tensor that is the same on every rank and of which every rank computes something else.

    Args:
        x: any shape.
        group: ranks that hold the same ``x``.
    """
    return x if group.size() == 1 else _apply(_Copy, x, group)


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' inputs; backward hands the gradient on (Megatron's *g*).

    For partial results that every rank continues with in the same way.

    Args:
        x: any shape, the same on every rank.
        group: ranks to sum over.
    """
    return x if group.size() == 1 else _apply(_Reduce, x, group)


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """All ranks' inputs joined along ``dim``; backward sums the gradients of all ranks and keeps this rank's slice.

    Args:
        x: this rank's slice, of the same shape on every rank.
        dim: tensor dimension to join along.
        group: ranks in the order of the slices.
    """
    return x if group.size() == 1 else _apply(_Gather, x, _positive(dim, x), group)


def gather_same(x: Tensor, dim: int, group: Group) -> Tensor:
    """All ranks' inputs joined along ``dim``; backward takes this rank's slice of its own gradient. Nothing is sent.

    For a whole with which every rank computes the same.

    Args:
        x: this rank's slice, of the same shape on every rank.
        dim: tensor dimension to join along.
        group: ranks in the order of the slices.
    """
    return x if group.size() == 1 else _apply(_GatherSame, x, _positive(dim, x), group)


def scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's slice of a tensor that all ranks hold; backward joins the gradients of all ranks.

    Args:
        x: the same on every rank.
        dim: tensor dimension to slice; must divide by the size of the group.
        group: ranks in the order of the slices.

    Raises:
        ValueError: if ``dim`` does not divide.
    """
    _check_divides(x, dim, group)
    return x if group.size() == 1 else _apply(_Scatter, x, _positive(dim, x), group)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's slice of the sum of all ranks' inputs; backward joins the gradients of all ranks.

    Args:
        x: partial results, the same shape on every rank.
        dim: tensor dimension to slice; must divide by the size of the group.
        group: ranks in the order of the slices.

    Raises:
        ValueError: if ``dim`` does not divide.
    """
    _check_divides(x, dim, group)
    return x if group.size() == 1 else _apply(_ReduceScatter, x, _positive(dim, x), group)


def all_to_all(x: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Rows of ``x`` sent to their ranks; the rows received, in the order of the ranks. Backward sends them back.

    Args:
        x: ``(rows, ...)``: first those for rank 0 of the group, then those for rank 1, ...
        group: ranks that exchange.
        send: how many rows go to each rank; their sum is the number of rows.
        receive: how many rows come from each rank.

    Returns:
        ``(sum of receive, ...)``.

    Raises:
        ValueError: if the counts do not fit the group or ``x``.
    """
    if len(send) != group.size() or len(receive) != group.size() or sum(send) != x.shape[0]:
        raise ValueError(
            f"all_to_all of {x.shape[0]} rows over {group.size()} ranks was given send={list(send)}, "
            f"receive={list(receive)}; each needs one count per rank, and send must sum to the rows."
        )
    return x if group.size() == 1 else _apply(_AllToAll, x, group, tuple(send), tuple(receive))


def _check_divides(x: Tensor, dim: int, group: Group) -> None:
    if x.shape[dim] % group.size():
        raise ValueError(
            f"A tensor of shape {tuple(x.shape)} cannot be split into {group.size()} equal slices along dim {dim}; its "
            f"length there must be a multiple of {group.size()}."
        )


def _positive(dim: int, x: Tensor) -> int:
    return dim % x.dim()


def _apply(function: type[Function], *args: Any) -> Tensor:
    return cast(Tensor, function.apply(*args))


def _joined(x: Tensor, dim: int, group: Group) -> Tensor:
    parts = flat_collectives.gather_parts(x, group)
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_from(gradient, ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return copy_to(gradient, ctx.group), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _joined(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(gradient, ctx.dim, ctx.group), None, None


class _GatherSame(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _joined(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return scatter(gradient, ctx.dim, ctx.group), None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return x.chunk(group.size(), dim)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gather_same(gradient, ctx.dim, ctx.group), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        pieces = x.contiguous() if dim == 0 else torch.cat(x.chunk(group.size(), dim))
        shape = list(x.shape)
        shape[dim] //= group.size()
        part = x.new_empty(shape)
        row, flat = part.view(-1), pieces.view(-1)  # gloo compares dim 0 of both sides
        flat_collectives.reduce_scatter(row, flat, group=group)
        return part

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gather(gradient, ctx.dim, ctx.group), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, send: tuple[int, ...], receive: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        x = x.contiguous()
        received = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(received, x, list(receive), list(send), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(gradient, ctx.group, ctx.receive, ctx.send), None, None, None
