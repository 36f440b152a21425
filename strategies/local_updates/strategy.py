"""Local SGD and DiLoCo strategies."""

from __future__ import annotations

from trainwright.strategies.local_updates.diloco import DiLoCoStrategy
from trainwright.strategies.local_updates.local_sgd import LocalSGDStrategy

__all__ = ["DiLoCoStrategy", "LocalSGDStrategy"]
