"""An optimizer of the Adam family whose ``eps`` is larger than the default that a library has.

Gradients that are zero but for rounding (of the bias of a key in attention) would otherwise be divided by their own
size, so that each layout steps elsewhere.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

EPS = 1e-4


class Damped:
    """Mixed into a module of a library, before it."""

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()  # type: ignore[misc]
        for optimizer in tree_iter(found):
            if isinstance(optimizer, Optimizer):
                for group in optimizer.param_groups:
                    group["eps"] = EPS
        return found
