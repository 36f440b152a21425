"""Options of ``strategy=single``."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.core.layout import Layout
from trainwright.strategies.contract.options import StrategyOptions


@dataclass
class SingleOptions(StrategyOptions):
    """`strategy=single`: one process, one device."""

    _target_: str = "trainwright.strategies.data.single.SingleDeviceStrategy"

    # The checks of `compression` refuse a single replica.
    averages_gradients = True
    takes_mps = True
    takes_sparse_gradients = True
    planned_as = "single"

    def layout(self) -> Layout:
        """Return the layout of one rank."""
        return Layout()

    def closed_layout(self, world_size: int) -> Layout:
        """Return the layout of one rank.

        Raises:
            ValueError: if there are more.
        """
        if world_size != 1:
            raise ValueError(too_many_devices(world_size))
        return Layout()


def too_many_devices(number: int) -> str:
    """Return the error of several devices."""
    return (
        f"strategy=single trains on one device; this run has {number} (devices x nodes); type devices=1 or strategy=ddp"
    )
