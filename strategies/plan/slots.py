"""Places where modules register a parameter."""

from __future__ import annotations

from torch import nn

# The module and the name in it.
Slot = tuple[nn.Module, str]


def find_slots(module: nn.Module) -> dict[int, list[Slot]]:
    """Return where each parameter of ``module`` is registered, by ``id``."""
    slots: dict[int, list[Slot]] = {}
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                slots.setdefault(id(parameter), []).append((owner, key))
    return slots
