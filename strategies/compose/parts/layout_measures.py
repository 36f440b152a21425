"""Measures and certificates of a partitioned module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from trainwright.strategies.base.measures import Measures
from trainwright.strategies.data.sharding.certified import CertifiedShards
from trainwright.strategies.plan.names import parent_of, starred, within
from trainwright.strategies.state.assemble import Assembly


class LayoutMeasures(Measures):
    """Measures of any layout."""

    _strategy: Any

    @property
    def _stages(self) -> Sequence[Any]:
        stages: Sequence[Any] = self._strategy._engines.pipeline_stages
        return stages

    def routing_balance(self) -> dict[str, float]:
        """See the base class."""
        found: dict[str, float] = self._strategy._engines.routing_balance()
        return found


class CertifiedParts(CertifiedShards):
    """Certificates of a module partitioned along any axis."""

    def remedy(self, module: str) -> str:
        """See the base class."""
        layout = self._strategy.layout
        if layout.tensor > 1 and layout.pipeline == 1:  # else micro-batches may be the cause
            plan = self._strategy._engines.plan
            split = dict.fromkeys(starred(name) for name in plan.tensor if within(name, parent_of(module) or module))
            whole = ", ".join(f"{name}: none" for name in split)
            if whole:
                return f"Leave it whole: 'strategy.plan.tensor={{{whole}}}', or use tensor=1."
        axes = ("pipeline", "context", "tensor", "expert")
        used = [axis for axis in axes if getattr(layout, axis) > 1]
        return f"Use {' or '.join(f'{axis}=1' for axis in used)}." if used else super().remedy(module)

    def adapts(self) -> bool:
        """See the base class: a pipeline may run the code after the blocks once per batch."""
        is_new: bool = self._strategy._engines.join_micro_batches()
        return is_new

    def parts(self) -> tuple[Assembly, dist.ProcessGroup | None]:
        """See the base class."""
        return self._strategy._assembly, self._strategy._groups.along("pipeline", "context", "tensor")
