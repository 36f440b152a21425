"""Operations of a module's forward and backward, counted while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

# Torch's table has the kernels of GPUs alone.
_ATTENTION_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"


class CountedOperations(TorchDispatchMode):
    """Counts floating-point operations of matrix products, convolutions and attention on this rank, by torch's table.

    A product and the addition that goes with it are two. What activation checkpointing computes again in backward is
    left out: it is no part of the model. Attention counts as whole where a mask hides half of it. Values are left as
    they are.

    Attributes:
        total: operations so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again with what this rank holds
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if not _is_computed_again():
            self.total += operations_of(func, args, kwargs, output)
        return output


def _is_computed_again() -> bool:
    """Whether backward goes through a forward pass: only there are gradients recorded within it."""
    return torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()


def operations_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
    """Floating-point operations of one call of an operator; 0 for what is no product."""
    packet = func._overloadpacket
    name = packet.__name__
    if name == _ATTENTION_ON_CPU:
        return float(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if name == f"{_ATTENTION_ON_CPU}_backward":
        return float(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=output))
    return 0.0
