"""Metrics of a run as its checkpoints record them, and its checkpoint folder."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from trainwright.checkpoint.read.find import list_checkpoints
from trainwright.core.errors import CheckpointError


def is_dev_run(trainer: Trainer) -> bool:
    """Return whether this is a ``fast_dev_run``, which saves nothing."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def fresh_metrics(trainer: Trainer) -> dict[str, Any]:
    """Return what the current loop has logged; ``callback_metrics`` also has old values."""
    if trainer._results is None:
        return {}
    return trainer._logger_connector.metrics["callback"]


def logged_metrics(trainer: Trainer, monitor: str | None, measured: tuple[int, float] | None) -> dict[str, float]:
    """Return everything logged so far; the monitored value only if it is of the current step.

    Args:
        trainer: of the run.
        monitor: name of the monitored value; ``None``: none.
        measured: step and value of the last measurement of ``monitor``.
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
    """Raise a ``ValueError`` if the monitored value was not logged by the end of an epoch."""
    if monitor not in trainer.callback_metrics and not is_dev_run(trainer):
        raise ValueError(
            f"RunStateCheckpoint(monitor={monitor!r}): no such value was logged. Logged were: "
            f"{', '.join(sorted(trainer.callback_metrics)) or 'none'}. Monitor one of these, or self.log() it."
        )


def warn_of_later_checkpoints(folder: str, step: int) -> None:
    """Warn if a folder holds checkpoints of later steps than the run starts at."""
    try:
        later = [found for found in list_checkpoints(folder) if found.step > step]
    except CheckpointError:
        return  # saving will report it
    if later:
        rank_zero_warn(
            f"{folder} holds checkpoints of later steps than {step}, at which this run starts, up to {later[0].path}; "
            "ckpt_path=last resumes the latest good one. Delete them, or save into another folder (dirpath)."
        )
