"""Training on a single device."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy as LightningSingleDeviceStrategy

from trainwright.strategies.base.strategy import LayoutStrategy
from trainwright.strategies.data.options import SingleOptions, too_many_devices


class SingleDeviceStrategy(LayoutStrategy, LightningSingleDeviceStrategy):
    """Training on one device, the reference of all other strategies.

    Args:
        device: ``None`` takes the device chosen by the Trainer.
        **kwargs: options, see :class:`~trainwright.strategies.data.options.SingleOptions`.
    """

    strategy_name = "single"
    saves_one_file = True
    options_class = SingleOptions

    def __init__(self, device: torch.device | str | None = None, **kwargs: Any) -> None:
        super().__init__(device=device or "cpu", **kwargs)
        self._device_given = device is not None

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The device as a list, once known; set by the Trainer."""
        return [self.root_device] if self._device_given else []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise ValueError(too_many_devices(len(devices)))
        self._root_device = torch.device(devices[0])
        self._device_given = True

    def setup(self, trainer: Trainer) -> None:
        """Materialize the model, prepare its blocks, then set up as Lightning does."""
        self._materialise()
        self._blocks.prepare(self.lightning_module, self._find_blocks())
        super().setup(trainer)
        self.state.load_initial_weights()
