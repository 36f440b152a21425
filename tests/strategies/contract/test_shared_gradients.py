"""Gradients of parameters that several ranks hold, not all of which use them."""

import torch
import torch.distributed as dist
from torch import nn

from trainwright.strategies.contract.gradients import sum_gradients


def summed() -> list[list[float] | None]:
    rank = dist.get_rank()
    both, first, zero, none = (nn.Parameter(torch.full((2,), 5.0)) for _ in range(4))
    both.grad = torch.tensor([1.0, 2.0]) * (1 + rank)
    if rank == 0:
        first.grad, zero.grad = torch.tensor([3.0, 4.0]), torch.zeros(2)
    sum_gradients([both, first, zero, none], dist.group.WORLD)
    return [p.grad if p.grad is None else p.grad.tolist() for p in (both, first, zero, none)]


def test_ranks_without_a_gradient_get_that_of_the_others(ranks) -> None:
    # A zero gradient is one, too: weight decay and momentum apply.
    assert ranks(summed, 2) == [[[3.0, 6.0], [3.0, 4.0], [0.0, 0.0], None]] * 2
