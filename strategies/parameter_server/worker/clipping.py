"""Clipping, and steps that are skipped, where servers average."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.optim import Optimizer

from trainwright.strategies.contract.precision import AgreedGradScaler
from trainwright.strategies.parameter_server.worker.optimizer import ServedOptimizer


class ServedClipping:
    """Clips the average of all workers; a :class:`~trainwright.strategies.contract.precision.GradientClipper`.

    Args:
        served: the optimizer that servers step.
        in_step: whether all workers make each step together.
    """

    def __init__(self, served: ServedOptimizer, in_step: bool) -> None:
        self._served, self._in_step = served, in_step
        # Whether this step is skipped because a scaled gradient of some worker is not finite.
        self._overflows = False

    def attach(self, plugin: Precision) -> None:
        """Let a precision plugin ask this."""
        given: Any = plugin
        if hasattr(given, "clipper"):
            given.clipper = self if self._in_step else None
        scaler = getattr(given, "scaler", None)
        if isinstance(scaler, AgreedGradScaler):
            scaler.always_agrees, scaler.agree = True, self._agree

    def clip_norm(self, optimizer: Optimizer, max_norm: float, error_if_nonfinite: bool) -> None:
        """Scale the averaged gradient of the coming step so that its norm is at most ``max_norm``."""
        if not self._overflows:
            self._served.clip_norm(max_norm, error_if_nonfinite)

    def clip_value(self, optimizer: Optimizer, limit: float) -> None:
        """Clamp the elements of the averaged gradient of the coming step."""
        if not self._overflows:
            self._served.clip_value(limit)

    def _agree(self, flag: Tensor) -> Tensor:
        """Whether any worker's gradients overflow, where all make the step; else whether this one's do."""
        if self._in_step:
            flag = flag.new_tensor(self._served.client.vote(float(flag)))
        self._overflows = bool(flag)
        return flag
