"""FLOP counting of a module's forward and backward while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from trainwright.core.torch_internals import TorchDispatchMode

# Torch's table has only the kernels of GPUs.
_ATTENTION_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"


class CountedOperations(TorchDispatchMode):
    """Counts FLOPs of matrix products, convolutions and attention on this rank, by torch's table.

    A multiply-add is two. Recomputation by activation checkpointing is left out. Attention counts in full even if a
    mask hides half of it. In compiled code, products count that call torch's kernels: all, but with
    ``mode="max-autotune"``.

    Attributes:
        total: FLOPs so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let modules compile meanwhile; otherwise Dynamo skips code that it meets here to the end of the run."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # dispatched again with the local tensor
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if not (torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()):
            self.total += operations_of(func, args, kwargs, output)
        return output


def operations_of(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, halve_causal: bool = False
) -> float:
    """Return the FLOPs of one operator call, by torch's table; 0 if it is no product.

    Args:
        func: the operator, as passed to ``__torch_dispatch__``.
        args, kwargs: of the call; meta tensors are allowed.
        output: of the call.
        halve_causal: count causal attention of the CPU kernel half, as kernels skip what the mask hides; ``False``: in
            full, as torch's table counts GPU kernels.
    """
    packet = func._overloadpacket
    name = packet.__name__
    if name.startswith(_ATTENTION_ON_CPU):
        return _attention(args, kwargs, name.endswith("_backward"), halve_causal)
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=output))
    return 0.0


def _attention(args: tuple[Any, ...], kwargs: Mapping[str, Any], is_backward: bool, halve_causal: bool) -> float:
    query, key, value = (tuple(tensor.shape) for tensor in (args[1:4] if is_backward else args[:3]))
    if len(query) == 4:
        # Grouped-query attention: each query head counts.
        key, value = ((*query[:2], *shape[2:]) for shape in (key, value))
    count = sdpa_backward_flop_count(query, query, key, value) if is_backward else sdpa_flop_count(query, key, value)
    place = 7 if is_backward else 4
    is_causal = kwargs.get("is_causal", args[place] if len(args) > place else False)
    return count / 2 if is_causal and halve_causal else float(count)
