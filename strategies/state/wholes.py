"""Sharded tensors to whole ones and back, for checkpoints that any layout can read."""

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
from trainwright.strategies.state.shards import rows_of


def whole_tensor(tensor: DTensor) -> Tensor:
    """The whole of a sharded tensor on the CPU of every rank. A collective: all ranks must call it."""
    return whole_on_device(tensor).to("cpu", copy=True)


@torch.no_grad()
def whole_on_device(tensor: DTensor) -> Tensor:
    """The whole of a sharded tensor on the device of its mesh; it may share memory with the part. A collective.

    One plain all-gather for a tensor split along one mesh axis, which is every one that ZeRO makes.
    """
    mesh, part = tensor.device_mesh, tensor._local_tensor.detach()
    if part.device.type != mesh.device_type:  # offloaded: collectives of this mesh run on its own device
        part = part.to(mesh.device_type)
    split = [axis for axis, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
    if not split or not tensor.numel():
        return part
    placement = tensor.placements[split[0]]
    if len(split) > 1 or type(placement) is not Shard:
        return DTensor.from_local(
            part, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        ).full_tensor()
    rows = _gather_rows(part.movedim(placement.dim, 0), tensor.shape[placement.dim], mesh.get_group(split[0]))
    return rows.movedim(0, placement.dim)


def _gather_rows(part: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank's rows of dim 0 joined; a rank's part is ``torch.chunk``'s of ``length`` rows."""
    rows = -(-length // dist.get_world_size(group))
    padded = part.new_zeros(rows, *part.shape[1:])
    padded[: len(part)].copy_(part)
    return gather_parts(padded, group).flatten(0, 1)[:length]


def gather_tree(tree: Any, keep: bool) -> Any:
    """A copy of nested dicts, lists and tuples with every DTensor whole and on the CPU.

    One tensor at a time is gathered. A collective: all ranks must call it on trees of the same form.

    Args:
        tree: what to gather.
        keep: ``False`` drops gathered values (``None`` stands in), for ranks that do not write.
    """

    def gathered(tensor: DTensor) -> Tensor | None:
        whole = whole_tensor(tensor)
        return whole if keep else None

    return map_tree(tree, DTensor, gathered)


def part_like(value: Tensor, like: DTensor) -> DTensor:
    """The part of the whole ``value`` that this rank holds, split as ``like`` is; no communication.

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
    return DTensor.from_local(part, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def shard_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], owns: Callable[[Tensor], bool | None]
) -> dict[str, Any]:
    """The part of a whole optimizer ``state_dict`` that belongs to the parameters of ``optimizer`` on this rank.

    Args:
        optimizer: this rank's.
        state: of the whole module.
        owns: whether this rank has the state of a parameter whole, or nothing of it; ``None``: as it has the parameter.
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
    """Let ``module.load_state_dict`` take whole tensors for its sharded parameters."""

    def split(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):  # tied ones are saved under each name
            value = state_dict.get(prefix + name)
            if isinstance(parameter, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
                state_dict[prefix + name] = part_like(value.to(parameter.dtype), parameter)

    register_taking(module, split)


def register_taking(module: nn.Module, hook: Callable[..., None]) -> None:
    """Let ``hook`` take this rank's parts of what ``module.load_state_dict`` is given whole; it changes no value."""
    hook.takes_parts = True  # type: ignore[attr-defined]
    module.register_load_state_dict_pre_hook(hook)


def only_takes_parts(hook: Any) -> bool:
    """Whether a hook of ``load_state_dict`` is one that :func:`register_taking` has registered."""
    return bool(getattr(getattr(hook, "hook", hook), "takes_parts", False))
