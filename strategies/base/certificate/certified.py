"""What the certificate asks of a strategy: what is split, who holds which part, what to type where numbers differ."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.state.assemble import Assembly


class Certified:
    """A module that every rank holds whole, so that there is nothing to certify.

    Args:
        strategy: that trains it.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def is_split(self) -> bool:
        """Whether ranks that step together hold parts of the module."""
        return False

    def remedy(self, module: str) -> str:
        """Return what to type where the layout computes other numbers than the module as written.

        Args:
            module: name of the first module or parameter that differs; empty: it is not known.
        """
        return "Use strategy=ddp."

    def held(self, name: str) -> Tensor | None:
        """Return this rank's part of a parameter between two steps; ``None``: another rank holds it."""
        found: Tensor | None = dict(self._strategy.lightning_module.named_parameters()).get(name)
        return found

    def shares(self, batch: Any) -> list[tuple[Any, float]]:
        """Return the parts of a batch whose losses the user has said to be weighed one by one, and their weights.

        The certificate compares with their weighted mean, else with the loss of the whole batch.
        """
        return [(batch, 1.0)]

    def parts(self) -> tuple[Assembly | None, dist.ProcessGroup | None]:
        """Return where parts of parameters are, and the ranks that share this rank's samples.

        ``None``: parameters are whole; there are no others.
        """
        return None, None
