"""The loss scale of float16."""

from __future__ import annotations

from lightning.pytorch import Trainer

from trainwright.callbacks.monitor.records import publish
from trainwright.callbacks.windows import Windowed


class LossScale(Windowed):
    """Log the loss scale of ``precision="16-mixed"`` as ``loss_scale``, and emit it as a ``scale`` record on every
    rank.

    Args:
        every_n_steps: optimizer steps of a window; ``None``: the Trainer's ``log_every_n_steps`` (where 0 is off).

    Raises:
        ValueError: if ``every_n_steps`` is less than 1.
    """

    def _report(self, trainer: Trainer, step: int) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            scale = float(scaler.get_scale())
            publish(trainer, step, "scale", {"scale": scale}, {"loss_scale": scale})
