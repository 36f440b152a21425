"""A strategy's facts for the certificate: whether and how the module is split, and remedies."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.state.assemble import Assembly


class Certified:
    """Facts about a module that is replicated on every rank, so that there is nothing to certify.

    Args:
        strategy: that trains it.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def is_split(self) -> bool:
        """True if the module is split over ranks."""
        return False

    def remedy(self, module: str) -> str:
        """Return what to type if the layout's results differ from those of the module as written.

        Args:
            module: name of the first module or parameter that differs; empty: unknown.
        """
        return "Use strategy=ddp."

    def held(self, name: str) -> Tensor | None:
        """Return this rank's part of a parameter, between two steps; ``None``: another rank holds it."""
        return dict(self._strategy.lightning_module.named_parameters()).get(name)

    def adapts(self) -> bool:
        """Compute steps in another way from now on, whose results were not those of the module; if there is one."""
        return False

    def parts(self) -> tuple[Assembly, dist.ProcessGroup | None]:
        """Return the locations of parts and the group that shares samples; ``None``: this rank alone."""
        return Assembly.of_whole(), None
