"""Changes of a module's buffers and counters in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torchmetrics import Metric

Changes = Mapping[str, Tensor]


class StateBefore:
    """Snapshot of a module's buffers and integer attributes. Floats are excluded, since they may be times."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = {name: value.clone() for name, value in _state_of(module)}

    def changes(self) -> Changes:
        """Return the difference of each value that has changed since and kept its shape, by name."""
        pairs = ((name, value, self._values.get(name)) for name, value in _state_of(self._module))
        return {
            name: _number(value) - _number(before)
            for name, value, before in pairs
            if before is not None and before.shape == value.shape and not torch.equal(before, value)
        }


def _state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, sub in module.named_modules():
        if isinstance(sub, Metric):
            continue  # accumulates over micro-batches, and is synchronized when computed
        prefix = f"{path}." if path else ""
        for name, buffer in sub._buffers.items():
            # Pipeline stages have placeholders for values of other stages.
            if type(buffer) is Tensor and not buffer.is_meta and buffer.layout is torch.strided:
                yield prefix + name, buffer.detach()
        for name, value in vars(sub).items():
            if type(value) is int and abs(value) < 2**53:
                yield prefix + name, torch.tensor(value)


def _number(value: Tensor) -> Tensor:
    return value.cpu().to(torch.complex128 if value.is_complex() else torch.float64)


def first_difference(
    layout: Changes, plain: Changes, is_on_rank: Callable[[str], bool], tolerance: float
) -> str | None:
    """Return the name of the first value that the layout changes differently than the module as written.

    Args:
        layout, plain: their changes on this rank.
        is_on_rank: whether the layout runs the submodule of a path on this rank.
        tolerance: relative difference explained by rounding.
    """
    for name in [*plain, *(name for name in layout if name not in plain)]:
        one, other = layout.get(name), plain.get(name)
        shown = one if other is None else other
        assert shown is not None
        one, other = (torch.zeros_like(shown) if each is None else each for each in (one, other))
        if one.shape != other.shape or not is_on_rank(name.rpartition(".")[0]):
            continue  # this rank has only a part
        if not (one - other).abs().max() <= tolerance * max(float(other.abs().max()), 1e-6):
            return name
    return None
