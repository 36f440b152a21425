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
whole, ``gather_same`` where all compute the same. Other linear maps are made with :func:`linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from trainwright.strategies.contract.collectives import flat as flat_collectives

Group = dist.ProcessGroup


def linear(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """``forward(x)``, whose gradient is ``backward`` of the result's.

    Args:
        x: any shape.
        forward: a linear map, run without recording gradients; returns another tensor than it was given.
        backward: made of differentiable functions, if it is to be differentiated itself.
    """
    return cast(Tensor, LinearMap.apply(forward, backward, x))


class LinearMap(Function):
    """A linear map of tensors and the map of their gradients; called as ``apply(forward, backward, *tensors)``."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.map = backward
        return forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.map(*gradients)
        return None, None, *(found if isinstance(found, tuple) else (found,))


def same(x: Tensor) -> Tensor:
    """The values of ``x`` as another tensor, for a forward of :func:`linear` that changes none."""
    return x.view_as(x)


def copy_to(x: Tensor, group: Group) -> Tensor:
    """The input; backward sums the gradients of all ranks (Megatron's *f*).

    For a tensor that is the same on every rank and of which every rank computes something else.

    Args:
        x: any shape.
        group: ranks that hold the same ``x``.
    """
    return x if group.size() == 1 else linear(x, same, lambda gradient: reduce_from(gradient, group))


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' inputs; backward hands the gradient on (Megatron's *g*).

    For partial results that every rank continues with in the same way.

    Args:
        x: any shape, the same on every rank.
        group: ranks to sum over.
    """
    if group.size() == 1:
        return x
    return linear(x, lambda x: flat_collectives.summed(x, group), lambda gradient: copy_to(gradient, group))


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """All ranks' inputs joined along ``dim``; backward sums the gradients of all ranks and keeps this rank's slice.

    Args:
        x: this rank's slice, of the same shape on every rank.
        dim: tensor dimension to join along.
        group: ranks in the order of the slices.
    """
    return _joined(x, dim, group, reduce_scatter)


def gather_same(x: Tensor, dim: int, group: Group) -> Tensor:
    """All ranks' inputs joined along ``dim``; backward takes this rank's slice of its own gradient. Nothing is sent.

    For a whole with which every rank computes the same.

    Args:
        x: this rank's slice, of the same shape on every rank.
        dim: tensor dimension to join along.
        group: ranks in the order of the slices.
    """
    return _joined(x, dim, group, scatter)


def _joined(x: Tensor, dim: int, group: Group, backward: Callable[[Tensor, int, Group], Tensor]) -> Tensor:
    if group.size() == 1:
        return x
    dim = dim % x.dim()

    def forward(x: Tensor) -> Tensor:
        parts = flat_collectives.gather_parts(x, group)
        return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)

    return linear(x, forward, lambda gradient: backward(gradient, dim, group))


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
    if group.size() == 1:
        return x
    dim = dim % x.dim()

    def forward(x: Tensor) -> Tensor:
        return x.chunk(group.size(), dim)[group.rank()].contiguous()

    return linear(x, forward, lambda gradient: gather_same(gradient, dim, group))


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
    if group.size() == 1:
        return x
    dim = dim % x.dim()

    def forward(x: Tensor) -> Tensor:
        return flat_collectives.scatter_sum(x.unflatten(dim, (group.size(), -1)).movedim(dim, 0), group)

    return linear(x, forward, lambda gradient: gather(gradient, dim, group))


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
    if group.size() == 1:
        return x

    def forward(x: Tensor) -> Tensor:
        received = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(received, x.contiguous(), list(receive), list(send), group=group)
        return received

    return linear(x, forward, lambda gradient: all_to_all(gradient, group, receive, send))


def _check_divides(x: Tensor, dim: int, group: Group) -> None:
    if x.shape[dim] % group.size():
        raise ValueError(
            f"A tensor of shape {tuple(x.shape)} cannot be split into {group.size()} equal slices along dim {dim}; its "
            f"length there must be a multiple of {group.size()}."
        )
