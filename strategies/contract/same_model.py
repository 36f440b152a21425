"""Checks that all ranks built the same model, and helpers to make their values equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from trainwright.checkpoint.exchange.distinct import all_gather_values
from trainwright.core.torch_internals import _get_default_group, _NormBase

# Bucket size of a coalesced broadcast.
_BROADCAST_BYTES = 250 * 2**20
# Name and form (shape, dtype, whether it is trained) of each tensor of a module.
Forms = Sequence[tuple[str, str]]


def forms_of(module: nn.Module) -> list[tuple[str, str]]:
    """Return names and forms of parameters and buffers, in order; they must be equal on all ranks."""
    return [(name, _form(tensor)) for name, tensor in [*module.named_parameters(), *module.named_buffers()]]


def _form(tensor: Tensor) -> str:
    kind = "trained" if tensor.requires_grad else "not trained"
    return f"{tuple(tensor.shape)} ({str(tensor.dtype).removeprefix('torch.')}, {kind})"


def difference_between(first: Forms, other: Forms) -> str:
    """Describe the first difference between two lists of forms."""
    for one, another in zip(first, other, strict=False):
        if tuple(one) != tuple(another):
            return f"{' '.join(one)}, where another has {' '.join(another)}"
    return f"{len(first)} tensors, where another has {len(other)}"


def refuse_different_models(module: nn.Module, device: torch.device) -> None:
    """Compare the module across ranks. A collective of two numbers.

    Args:
        module: as the user built it, before sharding.
        device: where collectives run.

    Raises:
        ValueError: on all ranks, if modules differ, or if a layer waits for a first batch to know its sizes.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    lazy = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"{', '.join(lazy[:4])}{' and others' if lazy[4:] else ''}: a lazy layer knows its sizes after the first "
            "batch, and several ranks cannot train a model without sizes. Run the model once on a batch of zeros at "
            "the end of __init__ or configure_model, or give the layer its sizes."
        )
    forms = forms_of(module)
    # 63 bits, so that one MAX of (x, -x) gives both the greatest and the least.
    digest = int.from_bytes(blake2b(repr(forms).encode(), digest_size=8).digest(), "big") >> 1
    extremes = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    greatest, least = extremes.tolist()
    if greatest == -least:
        return
    found: list[Forms] = all_gather_values(forms, device=device)
    others = [rank for rank, each in enumerate(found) if each != found[0]]
    raise ValueError(
        f"Rank(s) {', '.join(map(str, others))} have a different model than rank 0: rank 0 has "
        f"{difference_between(found[0], found[others[0]])}. Build the same module on every rank, whatever its data."
    )


def refuse_varying_weights(strategy: Any) -> None:
    """Refuse parameters that data-parallel ranks hold differently in the first step. A collective.

    Such are those that a forward sets from its own samples, as activation norms do.

    Args:
        strategy: in backward of the first step, whose ranks make it together.

    Raises:
        RuntimeError: on all ranks, naming a parameter.
    """
    held = [
        (name, parameter)
        for name, parameter in strategy.lightning_module.named_parameters()
        if not (isinstance(parameter, DTensor) or parameter.is_meta) and strategy._parts_of(name) == 1
    ]
    group = strategy.ranks.data_group
    differing = differ_between_ranks(held, strategy.root_device, group)
    if differing if group is None else strategy.reduce_boolean_decision(bool(differing), all=False):
        raise RuntimeError(
            f"Data-parallel ranks hold different values of {differing[0] if differing else 'a parameter'}: the module "
            "sets it in its first step, from the samples of one rank. Set it before fit (in __init__ or setup, from "
            "fixed samples), make its value the same on all ranks (self.all_gather), or train on one data rank."
        )


def refuse_rescaled_rows(module: nn.Module) -> None:
    """Refuse embeddings that change the rows of a batch as they are read: each data rank would change others.

    Raises:
        ValueError: if there are any.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ValueError(
                f"{name}: max_norm={part.max_norm} rescales the rows that a batch reads, in place, so data-parallel "
                "ranks would hold different weights. Rescale what is read instead, "
                "rows * (max_norm / rows.norm(dim=-1, keepdim=True)).clamp(max=1), or train on one data rank."
            )


def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Broadcast the values of the first rank of ``group`` (``None``: all) to the others, in place. A collective.

    Args:
        tensors: of equal shapes, in the same order on all ranks, on the device where collectives run.
        group: of ranks.
    """
    held = [tensor.detach() for tensor in tensors]
    if held and dist.get_world_size() > 1:
        dist._broadcast_coalesced(group or _get_default_group(), held, _BROADCAST_BYTES, 0)


def varying_buffers(module: nn.Module) -> list[str]:
    """Return the names of running means, which differ between ranks since they depend on the samples seen."""
    return [
        f"{name}.running_mean" if name else "running_mean"
        for name, part in module.named_modules()
        if isinstance(part, _NormBase) and part.running_mean is not None
    ]


@torch.no_grad()
def average_buffers(module: nn.Module) -> None:
    """Average floating-point buffers over all ranks and broadcast others from rank 0. A collective.

    Buffers that are equal on all ranks stay bit-identical.
    """
    if dist.get_world_size() == 1:
        return
    for buffer in module.buffers():
        if buffer.is_meta or not buffer.numel():
            continue
        first = buffer.clone()
        dist.broadcast(first, 0)
        if buffer.is_floating_point():
            # The plain mean of equal numbers may round differently; infinity minus infinity is NaN.
            difference = torch.where(buffer == first, 0.0, buffer - first)
            dist.all_reduce(difference)
            first += difference / dist.get_world_size()
        buffer.copy_(first)


def differ_between_ranks(
    wholes: Sequence[tuple[str, Tensor]], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[str]:
    """Return the names of tensors whose bits differ between the ranks of ``group`` (``None``: all). A collective."""
    if not wholes or not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    sums = torch.stack([bit_sum(tensor).to(device) for _, tensor in wholes])
    # Usually all are equal, which two numbers show.
    weights = torch.randint(-(2**62), 2**62, sums.shape, generator=torch.Generator().manual_seed(0)).to(device)
    if _are_equal((sums * weights).sum(0, keepdim=True), group).all():
        return []
    return [name for (name, _), same in zip(wholes, _are_equal(sums, group).tolist(), strict=True) if not same]


def _are_equal(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return which of this rank's integers all ranks have. A collective."""
    bounds = torch.cat([numbers, -numbers])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    most, least = bounds.chunk(2)
    return most == -least


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's elements reinterpreted as integers, which is exact in any order."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers: Callable[[int], torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.__getitem__
    return tensor.detach().contiguous().view(integers(tensor.element_size())).sum(dtype=torch.int64)
