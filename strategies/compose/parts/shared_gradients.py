"""Gradients summed over ranks: of tied weights, and of norms on slices of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.contract.groups import sum_over


class SharedGradients:
    """Sums gradients over process groups, with one all-reduce per group and dtype.

    Args:
        shared: process group -> parameters, in the same order on all of its ranks; frozen ones are skipped.
    """

    def __init__(self, shared: Mapping[dist.ProcessGroup, Iterable[nn.Parameter]]) -> None:
        kept = {group: [p for p in parameters if p.requires_grad] for group, parameters in shared.items()}
        self._shared = {group: parameters for group, parameters in kept.items() if parameters}

    def __bool__(self) -> bool:
        return bool(self._shared)

    def sum(self, optimized_of: Callable[[nn.Parameter], Tensor]) -> None:
        """Replace each gradient by the sum over its group; a collective of each group.

        Where this rank has no gradient, because its layers do not use the parameter, it gets that of the others.

        Args:
            optimized_of: returns the tensor that this rank optimizes in place of a parameter.
        """
        for group, parameters in self._shared.items():
            found = [optimized_of(parameter) for parameter in parameters]
            for dtype in dict.fromkeys(each.dtype for each in found):
                _sum([each for each in found if each.dtype == dtype], group)


def _sum(optimized: list[Tensor], group: dist.ProcessGroup) -> None:
    has = [each.grad is not None for each in optimized]
    parts = [local_tensor(each.detach() if each.grad is None else each.grad) for each in optimized]
    pieces = [part if own else torch.zeros_like(part) for part, own in zip(parts, has, strict=True)]
    pieces.append(parts[0].new_tensor(has))
    *sums, holders = sum_over(group, torch.cat([p.reshape(-1) for p in pieces])).split([p.numel() for p in pieces])
    # Read from the device only if this rank may have to follow others.
    counts = has if all(has) else holders.tolist()
    for each, total, count in zip(optimized, sums, counts, strict=True):
        if count:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
            part = local_tensor(each.grad)
            part.copy_(total.view(part.shape))
