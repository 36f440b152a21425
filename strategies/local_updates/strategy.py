"""Local SGD and DiLoCo: replicas step by themselves and are brought together every so many steps."""

from __future__ import annotations

from trainwright.strategies.local_updates.diloco import DiLoCoStrategy
from trainwright.strategies.local_updates.local_sgd import LocalSGDStrategy

__all__ = ["DiLoCoStrategy", "LocalSGDStrategy"]
