"""Gradients summed over ranks: of tied weights, and of norms on slices of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.strategies.contract.groups import sum_over

# Returns the local gradient of a parameter as this rank optimizes it, and its local value (for the shape).
GradientOf = Callable[[nn.Parameter], tuple[Tensor | None, Tensor]]


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

    def sum(self, gradient_of: GradientOf) -> None:
        """Replace each gradient by the sum over its group; a collective of each group.

        Raises:
            RuntimeError: if a parameter has a gradient on another rank of its group, but not on this one.
        """
        for group, parameters in self._shared.items():
            found = [gradient_of(parameter) for parameter in parameters]
            for dtype in dict.fromkeys(part.dtype for _, part in found):
                _sum([(gradient, part) for gradient, part in found if part.dtype == dtype], group)


def _sum(found: list[tuple[Tensor | None, Tensor]], group: dist.ProcessGroup) -> None:
    pieces = [torch.zeros_like(part) if gradient is None else gradient for gradient, part in found]
    flat = sum_over(group, torch.cat([piece.reshape(-1) for piece in pieces]))
    for (gradient, part), piece in zip(found, flat.split([piece.numel() for piece in pieces]), strict=True):
        if gradient is not None:
            gradient.copy_(piece.view(part.shape))
        elif piece.any():
            raise RuntimeError(
                f"A parameter of shape {tuple(part.shape)} that ranks share contributed to the loss on another rank, "
                "but not on this one. Use it in every training_step, or freeze it."
            )
