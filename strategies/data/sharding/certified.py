"""Certificates of strategies whose ranks share one copy of the training state."""

from __future__ import annotations

from torch import Tensor

from trainwright.strategies.base.certificate.certified import Certified


class CertifiedShards(Certified):
    """Certificates of a module whose optimizer state, gradients or parameters are split."""

    @property
    def is_split(self) -> bool:
        """See the base class."""
        strategy = self._strategy
        is_served = any(map(strategy.tables.has, strategy.lightning_module.parameters()))  # tables have their own check
        return strategy.layout.world_size > strategy.layout.replicate and not is_served

    def held(self, name: str) -> Tensor | None:
        """See the base class."""
        return self._strategy._exchanges.named.get(name)  # type: ignore[no-any-return]
