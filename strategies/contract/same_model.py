"""Ranks hold their models against each other before they send numbers of them, which would abort or mix them up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainwright.checkpoint.exchange.distinct import all_gather_values
from trainwright.core.torch_internals import _get_default_group, _NormBase

# Of tensors that are joined for one broadcast.
_BROADCAST_BYTES = 250 * 2**20
# Name and form (shape, dtype, whether it is trained) of each tensor of a module.
Forms = Sequence[tuple[str, str]]


def forms_of(module: nn.Module) -> list[tuple[str, str]]:
    """What ranks that train one model must have alike: names and forms of parameters and buffers, in their order."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [(name, _form(tensor)) for name, tensor in named]


def _form(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "not initialized yet"
    kind = "trained" if tensor.requires_grad else "not trained"
    return f"{tuple(tensor.shape)} ({str(tensor.dtype).removeprefix('torch.')}, {kind})"


def difference_between(first: Forms, other: Forms) -> str:
    """The first place at which two that differ do so, in words."""
    for one, another in zip(first, other, strict=False):
        if tuple(one) != tuple(another):
            return f"{' '.join(one)}, where another has {' '.join(another)}"
    return f"{len(first)} tensors, where another has {len(other)}"


def refuse_other_models(module: nn.Module, device: torch.device) -> None:
    """Hold the module of every rank against that of the others; a collective of two numbers.

    Args:
        module: as the user built it, or ranks may hold other parts of it.
        device: where collectives run.

    Raises:
        ValueError: on all ranks, if one has another.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    forms = forms_of(module)
    # 63 bits: the least and the greatest of all ranks come of one collective, and each has its negative.
    digest = int.from_bytes(blake2b(repr(forms).encode(), digest_size=8).digest(), "big") >> 1
    extremes = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    greatest, least = extremes.tolist()
    if greatest == -least:
        return
    found: list[Forms] = all_gather_values(forms, device=device)
    others = [rank for rank, each in enumerate(found) if each != found[0]]
    raise ValueError(
        f"Rank(s) {', '.join(map(str, others))} have another model than rank 0, so that nothing of it can be shared or "
        f"averaged: rank 0 has {difference_between(found[0], found[others[0]])}. Build the same module on every rank; "
        "what it is made of may not depend on the rank, its machine or its data."
    )


def take_from_first(tensors: Iterable[Tensor]) -> None:
    """Give every rank the values that rank 0 has, in place; a collective.

    Args:
        tensors: alike on all ranks, in one order, on the device where collectives run.
    """
    held = [tensor.detach() for tensor in tensors]
    if held and dist.get_world_size() > 1:
        dist._broadcast_coalesced(_get_default_group(), held, _BROADCAST_BYTES, 0)


def varying_buffers(module: nn.Module) -> list[str]:
    """Names of running statistics: what differs all the same, since it depends on the samples that a rank has seen."""
    return [
        f"{name}.running_mean" if name else "running_mean"
        for name, part in module.named_modules()
        if isinstance(part, _NormBase) and part.running_mean is not None
    ]


@torch.no_grad()
def average_buffers(module: nn.Module) -> None:
    """Average floating-point buffers over all ranks and take others from the first; a collective.

    What is the same on all ranks stays as it is, to the bit.
    """
    if dist.get_world_size() == 1:
        return
    for buffer in module.buffers():
        if buffer.is_meta or not buffer.numel():
            continue
        first = buffer.clone()
        dist.broadcast(first, 0)
        if buffer.is_floating_point():
            # Not the plain mean: that of three equal numbers may be another one. Nor infinity minus infinity.
            apart = torch.where(buffer == first, 0.0, buffer - first)
            dist.all_reduce(apart)
            first += apart / dist.get_world_size()
        buffer.copy_(first)
