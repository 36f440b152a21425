"""The loss scale of float16."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer

from trainwright.callbacks.monitor.records import emit
from trainwright.callbacks.steps import log_metrics
from trainwright.callbacks.windows import Windowed


class LossScale(Windowed):
    """Log the loss scale of ``precision="16-mixed"`` as ``loss_scale``, and emit it as a ``scale`` record on every
    rank.

    Args:
        every_n_steps: optimizer steps of a window; ``None``: the Trainer's ``log_every_n_steps`` (where 0 is off).

    Raises:
        ValueError: if ``every_n_steps`` is less than 1.
    """

    looks_at_parameters = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Report at the end of a window."""
        step = self._ended(trainer)
        if step is None:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is None or not scaler.is_enabled():
            return
        scale = float(scaler.get_scale())
        emit(trainer, "scale", {"scale": scale}, step + 1)
        log_metrics(trainer, {"loss_scale": scale}, step)
