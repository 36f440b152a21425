"""Memory of parameters, of which ranks will hold parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainwright.core.config.options import refuse
from trainwright.strategies.plan.names import folded
from trainwright.strategies.state.wrapped_tensors import is_wrapped


def check_memory(module: nn.Module) -> None:
    """Store parameters so that ranks can hold parts of them.

    Raises:
        ValueError: if two share memory, or one wraps other tensors.
    """
    refuse(memory_problems(module))
    store_contiguously(module)


def memory_problems(module: nn.Module) -> Iterator[str]:
    """Yield what keeps ranks from holding parts: tensors that wrap others, distinct parameters in the same memory.

    Two frozen ones may share memory, since no rank steps them.
    """
    spans = []
    for name, p in module.named_parameters():
        if is_wrapped(p):
            yield (
                f"{name} is a {type(p).__name__}, which wraps other tensors, and ranks would hold parts of it. Use a "
                "plain parameter (for torchao's Float8Linear: enable_fsdp_float8_all_gather=False; strategy=zero3 "
                "gathers its weights in float8 by itself), or type strategy=ddp"
            )
        elif p.numel() and not p.is_meta and not isinstance(p, DTensor):
            last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            start = p.storage_offset() * p.element_size()
            end = start + (last + 1) * p.element_size()
            spans.append((p.untyped_storage().data_ptr(), start, end, name, p.requires_grad))
    for (storage, _, end, name, trained), (other, start, _, second, too) in pairwise(sorted(spans)):
        if storage == other and start < end and (trained or too):
            yield (
                f"{name} and {second} are two parameters in the same memory (tied by .data?), and ranks would hold "
                "parts of each. Tie them as one parameter (head.weight = embedding.weight), or type strategy=ddp"
            )


def store_contiguously(module: nn.Module) -> None:
    """Copy parameters with other strides, which cannot be split or sent as they are, such as a transposed view."""
    found = {n: p for n, p in module.named_parameters() if not isinstance(p, DTensor) and not p.is_contiguous()}
    for parameter in found.values():
        parameter.data = parameter.data.contiguous()
    if found:
        rank_zero_info(f"Stored contiguously, so that ranks can share it: {', '.join(folded(found))}.")


def apply_beside(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Run ``nn.Module._apply`` on all but the parameters that are sharded already."""
    for sub in module.modules():
        moves_more = type(sub)._apply is not nn.Module._apply  # the states of a metric
        if moves_more and not any(isinstance(parameter, DTensor) for parameter in sub.parameters()):
            type(sub)._apply(sub, function)  # the module's own may call this function
            continue
        for parameter in sub._parameters.values():
            if parameter is not None and not isinstance(parameter, DTensor):
                parameter.data = function(parameter.data)
        for name, buffer in sub._buffers.items():
            if buffer is not None:
                sub._buffers[name] = function(buffer)


def own_elements(module: nn.Module) -> None:
    """Copy buffers with unusual strides, such as those of ``expand``: values of other ranks cannot be written there."""
    for sub in module.modules():
        for name, buffer in sub._buffers.items():
            if buffer is not None and buffer.layout is torch.strided and buffer.stride() != _usual_strides(buffer):
                sub._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


def _usual_strides(tensor: Tensor) -> tuple[int, ...]:
    return torch.empty(tensor.shape, device="meta").stride()


def keep_in_place(module: nn.Module) -> None:
    """Keep the recurrent layers of a module from moving their weights.

    On a GPU they put those that are new to them into one block of memory for cuDNN. They would no longer be where the
    strategy gathers values; without that block, cuDNN copies them at each call.
    """
    for sub in module.modules():
        if isinstance(sub, nn.RNNBase):
            sub.__dict__["flatten_parameters"] = _leave_in_place


def _leave_in_place() -> None:
    """Do nothing, in place of ``flatten_parameters``."""
