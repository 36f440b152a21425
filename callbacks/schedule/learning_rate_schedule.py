"""A learning rate schedule from configuration, which replaces the module's own."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.callbacks.schedule.schedules import Schedule


class ScheduledRate(LRScheduler):
    """Learning rates, and betas if the schedule has any, set after each optimizer step.

    Args:
        optimizer: whose rates are set.
        schedule: from :mod:`trainwright.callbacks.schedule.schedules`.

    Raises:
        ValueError: if the length of a list of rates is not the number of parameter groups.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        groups = len(optimizer.param_groups)
        wrong = [length for length in schedule.lengths() if length != groups]
        if wrong:
            raise ValueError(
                f"{type(schedule).__name__}: a list of {wrong[0]} values for {groups} parameter group(s). Give as many "
                "values as there are groups, or one number for all."
            )
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Any]:
        """Return the rate of each parameter group for the next step."""
        return [self.schedule.rate(self.last_epoch, float(base), i) for i, base in enumerate(self.base_lrs)]

    def step(self, epoch: int | None = None) -> None:
        """Advance by a step."""
        super().step(epoch)
        for index, group in enumerate(self.optimizer.param_groups):
            betas = self.schedule.betas(self.last_epoch, index)
            if betas is not None and "betas" in group:
                group["betas"] = betas

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the schedule; the schedule itself is configuration."""
        names = ("base_lrs", "last_epoch", "_step_count", "_last_lr")
        return {name: getattr(self, name) for name in names}


class LearningRateSchedule(Callback):
    """Replaces the module's learning rate schedule by one that counts optimizer steps.

    Requires one optimizer and automatic optimization. The scheduler of `configure_optimizers` is ignored. The schedule
    is saved in checkpoints like the module's.

    Args:
        schedule: from :mod:`trainwright.callbacks.schedule.schedules`.

    Raises:
        ValueError: (when training starts) if the module has several optimizers or optimizes manually, or if the
            schedule needs the length of the run and it is unknown.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the module's schedule, before a checkpoint is loaded."""
        optimizers = trainer.strategy.optimizers
        if len(optimizers) != 1 or not pl_module.automatic_optimization:
            how = f"{len(optimizers)} optimizers" if len(optimizers) != 1 else "manual optimization"
            raise ValueError(
                f"LearningRateSchedule needs one optimizer and automatic optimization; {type(pl_module).__name__} has "
                f"{how}. Schedule learning rates in the module, and type schedule=none "
                "(callbacks.learning_rate_schedule=null, if you have set that)."
            )
        scheduler = ScheduledRate(optimizers[0], self.schedule.of_run(trainer.estimated_stepping_batches))
        trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(scheduler, interval="step")]
