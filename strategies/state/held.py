"""What a rank holds of the trained state, as boxes of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.state.assemble import StateOwners
from trainwright.strategies.state.placement import Placement, boxes_of


def trained_boxes(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    placement: Placement,
    name_of: Callable[[Tensor], str],
    owners: StateOwners | None = None,
) -> dict[str, TensorParts]:
    """Boxes of parameters and of the tensors in the states of optimizers, views of this rank's own; no collective.

    Ranks that hold the same box under the same key must have the same bytes in it.

    Args:
        module: the user's module as this rank holds it.
        optimizers: of its parameters.
        placement: who holds what.
        name_of: name of a parameter as an optimizer holds it.
        owners: of optimizer states that are whole; ``None``: there are none.

    Returns:
        ``weights/<parameter>`` and ``optimizer/<index>/<parameter>/<name of the value>`` -> boxes, in the order of the
        module. Parameters that this rank holds nothing of are left out.
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
    """Parameter, name and tensor of each value that the optimizer keeps."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield parameter, name, value
