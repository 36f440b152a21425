"""Optimizers of stages that train nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@contextmanager
def optimizers_without_parameters() -> Iterator[None]:
    """Within it an optimizer may be made of no parameters, which torch refuses.

    The stages of a pipeline hold different parameters, so that the user's ``configure_optimizers`` may find none to
    train on one (a frozen first half, a linear probe). Its optimizer then steps nothing, but has the groups and the
    learning rates that schedulers and callbacks read.
    """
    original = Optimizer.__init__

    def init(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        given = params if isinstance(params, Tensor) else list(params)
        if isinstance(given, Tensor) or given:
            original(self, given, defaults)
            return
        original(self, [nn.Parameter(torch.empty(0))], defaults)
        self.param_groups[0]["params"].clear()

    Optimizer.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.__init__ = original  # type: ignore[method-assign]
