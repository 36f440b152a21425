"""Gradients summed over ranks: of tied weights, and of norms on slices of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch.distributed as dist
from torch import Tensor, nn

from trainwright.strategies.contract.gradients import sum_gradients


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
            sum_gradients([optimized_of(parameter) for parameter in parameters], group)
