"""Differentiable collectives over one mesh axis, for engines that split a module's computation.

Every function is a linear map of plain tensors; its backward gives the gradient of the *sum of one replica's losses*,
see the table. Double backward works. In a group of one rank each returns its input.

================  ====================================  =========================================
function          forward                               backward
================  ====================================  =========================================
copy_to           identity                              sum over the ranks
reduce_from       sum over the ranks                    identity
gather            ranks' inputs joined along ``dim``    sum over the ranks, then this rank's slice
gather_same       ranks' inputs joined along ``dim``    this rank's slice
scatter           this rank's slice along ``dim``       ranks' gradients joined along ``dim``
reduce_scatter    sum, then this rank's slice           ranks' gradients joined along ``dim``
all_to_all        rows to the ranks that own them       rows back to where they came from
================  ====================================  =========================================

``copy_to`` and ``reduce_from`` are *f* and *g* of Megatron-LM (arXiv:1909.08053, section 3); ``gather`` and
``reduce_scatter`` are those of its sequence parallelism (arXiv:2205.05198, section 4.2). Use ``gather`` where ranks
compute different things from the gathered tensor, ``gather_same`` where all compute the same. :func:`linear` makes
other linear maps.
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
_Along = Callable[[Tensor, int, Group], Tensor]


def linear(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``forward`` to ``x``; the gradient is ``backward`` of the result's gradient.

    Args:
        x: any shape.
        forward: a linear map, run without autograd; must not return its input.
        backward: composed of differentiable functions, if double backward is needed.
    """
    return cast(Tensor, LinearMap.apply(forward, backward, x))


class LinearMap(Function):
    """A linear map of tensors and its adjoint; called as ``apply(forward, backward, *tensors)``."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.map = backward
        return forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.map(*gradients)
        return None, None, *(found if isinstance(found, tuple) else (found,))


def same(x: Tensor) -> Tensor:
    """Return a view of ``x``: an identity forward for :func:`linear`."""
    return x.view_as(x)


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Return the input; backward sums the gradients of all ranks (Megatron's *f*).

    For a replicated tensor from which every rank computes something different.

    Args:
        x: any shape.
        group: ranks that hold the same ``x``.
    """
    return x if group.size() == 1 else linear(x, same, lambda gradient: reduce_from(gradient, group))


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """Sum the inputs of all ranks; backward passes the gradient through (Megatron's *g*).

    For partial results with whose sum every rank computes the same.

    Args:
        x: any shape, the same on every rank.
        group: ranks to sum over.
    """
    if group.size() == 1:
        return x
    return linear(x, lambda x: flat_collectives.summed(x, group), lambda gradient: copy_to(gradient, group))


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Concatenate all ranks' inputs along ``dim``; backward sums the gradients and keeps this rank's slice.

    Args:
        x: this rank's slice, of the same shape on every rank.
        dim: tensor dimension to join along.
        group: ranks in the order of the slices.
    """
    return _joined(x, dim, group, reduce_scatter)


def gather_same(x: Tensor, dim: int, group: Group) -> Tensor:
    """Concatenate all ranks' inputs along ``dim``; backward takes this rank's slice of its own gradient, locally.

    For a gathered tensor with which every rank computes the same.

    Args:
        x: this rank's slice, of the same shape on every rank.
        dim: tensor dimension to join along.
        group: ranks in the order of the slices.
    """
    return _joined(x, dim, group, scatter)


def _joined(x: Tensor, dim: int, group: Group, backward: _Along) -> Tensor:
    if group.size() == 1:
        return x
    dim = dim % x.dim()

    def forward(x: Tensor) -> Tensor:
        parts = flat_collectives.gather_parts(x, group)
        return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)

    return linear(x, forward, lambda gradient: backward(gradient, dim, group))


def scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's slice of a replicated tensor; backward concatenates the gradients of all ranks.

    Args:
        x: the same on every rank.
        dim: tensor dimension to slice; must divide by the size of the group.
        group: ranks in the order of the slices.

    Raises:
        ValueError: if ``dim`` does not divide.
    """
    return _sliced(x, dim, group, lambda x, dim: x.chunk(group.size(), dim)[group.rank()].contiguous(), gather_same)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's slice of the sum of all ranks' inputs; backward concatenates the gradients.

    Args:
        x: partial results, the same shape on every rank.
        dim: tensor dimension to slice; must divide by the size of the group.
        group: ranks in the order of the slices.

    Raises:
        ValueError: if ``dim`` does not divide.
    """

    def forward(x: Tensor, dim: int) -> Tensor:
        return flat_collectives.scatter_sum(x.unflatten(dim, (group.size(), -1)).movedim(dim, 0), group)

    return _sliced(x, dim, group, forward, gather)


def all_to_all(x: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Send rows of ``x`` to their ranks and return the received rows, by rank. Backward sends gradients back.

    Args:
        x: ``(rows, ...)``: first those for rank 0 of the group, then those for rank 1, ...
        group: ranks that exchange.
        send: number of rows to each rank; they sum to the rows of ``x``.
        receive: number of rows from each rank.

    Returns:
        ``(sum of receive, ...)``.

    Raises:
        ValueError: if the counts do not match the group or ``x``.
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


def _sliced(x: Tensor, dim: int, group: Group, forward: Callable[[Tensor, int], Tensor], backward: _Along) -> Tensor:
    if x.shape[dim] % group.size():
        raise ValueError(
            f"A tensor of shape {tuple(x.shape)} cannot be split into {group.size()} equal slices along dim {dim}; its "
            f"length there must be a multiple of {group.size()}."
        )
    if group.size() == 1:
        return x
    dim = dim % x.dim()
    return linear(x, lambda x: forward(x, dim), lambda gradient: backward(gradient, dim, group))
