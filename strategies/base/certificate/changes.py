"""What a step changes in buffers and counters of a module, by the layout and as written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torchmetrics import Metric

Changes = Mapping[str, Tensor]


class StateBefore:
    """Buffers and integer attributes of a module at this moment. Floats may be times, which differ in any case.

    Args:
        module: whose.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = {name: value.clone() for name, value in _state_of(module)}

    def changes(self) -> Changes:
        """What has been added since to each value that has changed and kept its shape, by name."""
        pairs = ((name, value, self._values.get(name)) for name, value in _state_of(self._module))
        return {
            name: _number(value) - _number(before)
            for name, value, before in pairs
            if before is not None and before.shape == value.shape and not torch.equal(before, value)
        }


def _state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, sub in module.named_modules():
        if isinstance(sub, Metric):
            continue  # it adds up over micro-batches, and is synchronized when it is computed
        prefix = f"{path}." if path else ""
        for name, buffer in sub._buffers.items():
            # A pipeline leaves what stands for values of other stages.
            if type(buffer) is Tensor and not buffer.is_meta and buffer.layout is torch.strided:
                yield prefix + name, buffer.detach()
        for name, value in vars(sub).items():
            if type(value) is int and abs(value) < 2**53:
                yield prefix + name, torch.tensor(value)


def _number(value: Tensor) -> Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def first_other(
    layout: Changes, plain: Changes, is_computed_here: Callable[[str], bool], tolerance: float
) -> str | None:
    """Name of the first value that the layout changes otherwise than the module as written.

    Args:
        layout, plain: what each has changed, on this rank.
        is_computed_here: whether the layout runs the submodule of a path on this rank.
        tolerance: relative difference that rounding explains.
    """
    for name in [*plain, *(name for name in layout if name not in plain)]:
        one, other = layout.get(name), plain.get(name)
        shown = one if other is None else other
        assert shown is not None
        one, other = (torch.zeros_like(shown) if each is None else each for each in (one, other))
        if one.shape != other.shape or not is_computed_here(name.rpartition(".")[0]):
            continue  # a part of it
        if not (one - other).abs().max() <= tolerance * max(float(other.abs().max()), 1e-6):
            return name
    return None
