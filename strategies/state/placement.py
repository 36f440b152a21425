"""Locations of a run state's tensors on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.core.errors import CheckpointError
from trainwright.core.torch_internals import compute_local_shape_and_global_offset
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.state.assemble import Assembly, StateOwners
from trainwright.strategies.state.wrapped_tensors import is_wrapped, plain_tensors


def boxes_of(tensor: Tensor) -> TensorParts:
    """Return this rank's box of a DTensor, or a plain tensor as a whole."""
    if not isinstance(tensor, DTensor):
        return TensorParts.whole(tensor.detach())
    if any(not (placement.is_shard() or placement.is_replicate()) for placement in tensor.placements):
        raise CheckpointError(f"A DTensor with placements {tensor.placements} cannot be saved; reduce it first.")
    part = local_tensor(tensor).detach()
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return TensorParts(tensor.shape, part.dtype, [(tuple(offsets), part)])


class Placement:
    """Where the ranks of a layout hold tensors, and which rank writes them.

    Args:
        assembly: locations of the module's parts.
        is_first: whether this is rank 0, which writes values that are equal on all ranks.
        leads_stage: whether this is the first rank of its pipeline stage.
    """

    def __init__(self, assembly: Assembly, is_first: bool, leads_stage: bool) -> None:
        self.is_first = is_first
        self._assembly = assembly
        self._leads_stage = leads_stage

    def boxes(self, name: str, tensor: Tensor) -> TensorParts:
        """Return boxes of the whole for ``tensor``, which is split like this rank's parameter or buffer ``name``."""
        held = boxes_of(tensor)
        cut = self._assembly.cuts.get(name)
        return held if cut is None or tensor.dim() == 0 else cut.in_whole(held)

    def writes(self, name: str, is_parameter: bool) -> bool:
        """Return whether this rank writes ``name``: one stage does, and buffers, which may differ, its first rank."""
        return self._assembly.owns(name) and (is_parameter or self._leads_stage)

    def refuse_renamed(self, module: nn.Module) -> None:
        """Refuse parameters in parts under a new name in ``state_dict``: a checkpoint finds parts by their name.

        Raises:
            ValueError: if there are any.
        """
        parameters = dict(module.named_parameters(remove_duplicate=False))
        in_parts = {
            local_tensor(each).data_ptr(): name
            for name, each in parameters.items()
            if isinstance(each, DTensor) or name in self._assembly.cuts or self._assembly.pipeline is not None
        }
        for key, value in module.state_dict().items() if in_parts else ():
            if key in parameters or type(value) not in (Tensor, nn.Parameter, DTensor) or not value.numel():
                continue
            name = in_parts.get(local_tensor(value).data_ptr())
            if name is not None:
                raise ValueError(
                    f"state_dict() of {type(module).__name__} holds the parameter {name!r} as {key!r}. This layout "
                    "keeps parameters in parts, which checkpoints find by their names in named_parameters(). Leave "
                    "state_dict() as torch defines it, or use strategy=zero2."
                )

    def united(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Merge the entries of all stages, in the order of the unmodified module."""
        found: dict[str, Any] = {}
        for stage in reversed(self._assembly.gathered(mine)):  # earlier stages take precedence
            found.update(stage)
        order = {name: index for index, name in enumerate(dict.fromkeys((*self._assembly.keys, *self._assembly.names)))}
        return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))

    def group_names(self, optimizer: Optimizer, name_of: Callable[[Tensor], str]) -> list[list[str]]:
        """Return the parameter names of each group of ``optimizer``, merged over stages."""
        return self._assembly.group_names(optimizer, name_of)


def trained_boxes(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    placement: Placement,
    name_of: Callable[[Tensor], str],
    owners: StateOwners | None = None,
) -> dict[str, TensorParts]:
    """Return boxes of parameters and optimizer state, as views of this rank's tensors; no collective.

    Ranks with the same box under the same key must hold the same bytes.

    Args:
        module: the user's module on this rank.
        optimizers: of its parameters.
        placement: locations of shards.
        name_of: returns the name of an optimizer's parameter.
        owners: of unsharded optimizer states; ``None``: none.

    Returns:
        ``weights/<parameter>`` and ``optimizer/<index>/<parameter>/<name of the value>`` -> boxes, in the order of the
        module, without empty ones.
    """
    found = {f"weights/{name}": placement.boxes(name, each.detach()) for name, each in module.named_parameters()}
    for index, optimizer in enumerate(optimizers):
        for parameter, value_name, value in _states(optimizer):
            name = name_of(parameter)
            is_whole = owners is not None and name in owners
            is_alike = not is_whole and value.dim() > 0 and value.shape == parameter.shape
            held = placement.boxes(name, value) if is_alike else boxes_of(value if value.dim() else local_tensor(value))
            found[f"optimizer/{index}/{name}/{value_name}"] = held
    return {key: boxes for key, boxes in found.items() if boxes.parts}


def _states(optimizer: Optimizer) -> Iterator[tuple[Tensor, str, Tensor]]:
    """Yield parameter, name and tensor of each entry of the optimizer's state; wrapped tensors one by one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if is_wrapped(value):
                    yield from ((parameter, f"{name}/{index}", each) for index, each in enumerate(plain_tensors(value)))
                elif isinstance(value, Tensor):
                    yield parameter, name, value
