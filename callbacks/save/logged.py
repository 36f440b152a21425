"""What a run has logged when it is saved."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor


def is_trial(trainer: Trainer) -> bool:
    """Whether a run is made to see whether the code runs; it leaves nothing behind."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def fresh_metrics(trainer: Trainer) -> dict[str, Any]:
    """What was logged by the loop that runs now; ``callback_metrics`` also remembers what was logged long ago."""
    if trainer._results is None:
        return {}
    return trainer._logger_connector.metrics["callback"]


def logged_metrics(trainer: Trainer, monitor: str | None, measured: tuple[int, float] | None) -> dict[str, float]:
    """Everything logged so far; the monitored value only if it is one of this very step.

    Args:
        trainer: of the run.
        monitor: name of the monitored value; ``None``: none is.
        measured: step and monitored value that were seen last.
    """
    logged = trainer.callback_metrics.items()
    metrics = {name: float(value) for name, value in logged if not isinstance(value, Tensor) or value.numel() == 1}
    if monitor is None:
        return metrics
    metrics.pop(monitor, None)
    fresh = fresh_metrics(trainer).get(monitor)
    if measured is not None and measured[0] == trainer.global_step:
        metrics[monitor] = measured[1]
    elif fresh is not None:
        metrics[monitor] = float(fresh)
    return metrics


def refuse_unlogged(monitor: str, trainer: Trainer) -> None:
    """Refuse a monitored value that was not logged by the end of an epoch.

    Raises:
        ValueError: naming what was logged.
    """
    if monitor not in trainer.callback_metrics and not is_trial(trainer):
        raise ValueError(
            f"RunStateCheckpoint(monitor={monitor!r}): no such value was logged. Logged were: "
            f"{', '.join(sorted(trainer.callback_metrics)) or 'none'}. Monitor one of these, or self.log() it."
        )
