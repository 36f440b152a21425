"""Gathering of sharded tensors and sharding of whole ones, for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from trainwright.checkpoint.read.run_state import map_tree
from trainwright.strategies.contract.collectives.flat import gather_parts
from trainwright.strategies.state.shards import dtensor_like, rows_of


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor, or copy a plain one, on the CPU of every rank. A collective."""
    return whole_on_device(tensor).to("cpu", copy=True)


@torch.no_grad()
def whole_on_device(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on the device of its mesh; may share memory with the shard. A collective.

    Uses one plain all-gather for a tensor sharded along one mesh axis, as ZeRO does. A plain tensor is returned as it
    is, detached.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh, part = tensor.device_mesh, tensor._local_tensor.detach()
    if part.device.type != mesh.device_type:  # offloaded
        part = part.to(mesh.device_type)
    split = [axis for axis, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
    if not split or not tensor.numel():
        return part
    placement = tensor.placements[split[0]]
    if len(split) > 1 or type(placement) is not Shard:
        return dtensor_like(tensor, part).full_tensor()
    rows = _gather_rows(part.movedim(placement.dim, 0), tensor.shape[placement.dim], mesh.get_group(split[0]))
    return rows.movedim(0, placement.dim)


def _gather_rows(part: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    """Gather all ranks' rows of dim 0; a rank's part is that of ``torch.chunk`` of ``length`` rows."""
    padded = part.new_zeros(-(-length // dist.get_world_size(group)), *part.shape[1:])
    padded[: len(part)].copy_(part)
    return gather_parts(padded, group).flatten(0, 1)[:length]


def gather_tree(tree: Any, keep: bool) -> Any:
    """Return a copy of nested dicts, lists and tuples with every DTensor gathered on the CPU.

    Gathers one tensor at a time. A collective: all ranks must call it on trees of the same structure.

    Args:
        tree: to gather.
        keep: ``False`` replaces gathered values by ``None``, for ranks that do not write.
    """

    def gathered(tensor: DTensor) -> Tensor | None:
        whole = whole_tensor(tensor)
        return whole if keep else None

    return map_tree(tree, DTensor, gathered)


def part_like(value: Tensor, like: DTensor) -> DTensor:
    """Return this rank's shard of ``value``, sharded like ``like``; no communication.

    Raises:
        ValueError: if the shapes differ.
    """
    if value.shape != like.shape:
        raise ValueError(f"The saved tensor has shape {tuple(value.shape)}, the parameter {tuple(like.shape)}.")
    mesh, part = like.device_mesh, value
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            first, last = rows_of(part, mesh.size(axis), mesh.get_local_rank(axis))
            part = part[first:last]
    part = part.to(like._local_tensor.device, copy=True)
    return dtensor_like(like, part)


def shard_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], owns: Callable[[Tensor], bool | None]
) -> dict[str, Any]:
    """Return this rank's shard of a whole optimizer ``state_dict``.

    Args:
        optimizer: this rank's.
        state: of the whole module.
        owns: whether this rank has all of a parameter's state (``True``), none of it, or a shard like the parameter's
            (``None``).
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    by_index = dict(zip(indices, parameters, strict=True))
    parts = {
        index: _shard_values(values, by_index[index]) if owns(by_index[index]) is None else dict(values)
        for index, values in state["state"].items()
        if owns(by_index[index]) is not False
    }
    return {**state, "state": parts}


def _shard_values(values: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    if not isinstance(parameter, DTensor):
        return dict(values)
    return {
        key: part_like(value, parameter) if isinstance(value, Tensor) and value.shape == parameter.shape else value
        for key, value in values.items()
    }


def shard_weights_on_load(module: nn.Module) -> None:
    """Make ``module.load_state_dict`` accept whole tensors for its sharded parameters."""

    def split(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):  # saved under each tied name
            value = state_dict.get(prefix + name)
            if isinstance(parameter, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
                state_dict[prefix + name] = part_like(value.to(parameter.dtype), parameter)

    register_splitting(module.register_load_state_dict_pre_hook, split)


def register_splitting(register: Callable[[Callable[..., None]], Any], hook: Callable[..., None]) -> None:
    """Register a hook of ``load_state_dict`` that only splits whole tensors."""
    hook.only_splits = True  # type: ignore[attr-defined]
    register(hook)


def only_splits(hook: Any) -> bool:
    """Return whether a hook of ``load_state_dict`` was registered by :func:`register_splitting`."""
    return bool(getattr(getattr(hook, "hook", hook), "only_splits", False))
