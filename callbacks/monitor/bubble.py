"""Idle time of pipeline stages."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from trainwright.callbacks.monitor.records import publish
from trainwright.callbacks.steps import step_number
from trainwright.callbacks.windows import StopsWithTraining, Windowed


class Bubble(StopsWithTraining, Windowed):
    """Log the fraction of a step for which the rank's pipeline stages are idle, as ``pipeline/idle_share``.

    The last step of each window is measured (with accumulation, its first micro-batches). Every rank emits a ``bubble``
    record: ``busy`` and ``idle`` (seconds), ``began`` (unix seconds) and ``timeline``, a list of ``[begin, end, what,
    micro_batch, stage]``, see ``Entry``. No communication. Off, at no cost, without a pipeline.

    Args:
        every_n_steps: optimizer steps of a window; ``None``: the Trainer's ``log_every_n_steps`` (where 0 is off).

    Attributes:
        latest: the last record; empty before the end of the first window.

    Raises:
        ValueError: if ``every_n_steps`` is less than 1.
    """

    looks_at_parameters = False

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self.latest: dict[str, Any] = {}
        self._timeline: Any = None
        self._step: int | None = None  # the measured step
        self._began = 0.0  # 0: not measuring

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check for a pipeline."""
        super().on_train_start(trainer, pl_module)
        measures = getattr(trainer.strategy, "measures", None)  # absent on Lightning's own strategies
        self._timeline = None if measures is None else measures.pipeline_timeline()
        if self._timeline is None:
            self._window = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start measuring in the last step of a window."""
        if self._in_last_step(trainer) and self._step != step_number(trainer):
            self._step, self._began = step_number(trainer), time.time()
            self._timeline.start()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Mark the start of the optimizer."""
        if self._began:
            self._timeline.optimizer()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Report a measured step."""
        if self._step is None or not self._began:
            return
        began, self._began = self._began, 0.0
        self._timeline.stop()
        seconds, entries = self._timeline.take()
        busy = sum(each.end - each.begin for each in entries)
        idle = max(seconds - busy, 0.0)
        timeline = [list(each) for each in entries]
        self.latest = {"busy": busy, "idle": idle, "began": began, "timeline": timeline}
        publish(trainer, self._step, "bubble", self.latest, {"pipeline/idle_share": idle / max(seconds, 1e-9)})

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discard the measurement."""
        self._stop()
        super().on_gone_back(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop measuring."""
        super().teardown(trainer, pl_module, stage)
        self._timeline = None

    def _stop(self) -> None:
        self._step, self._began = None, 0.0
        if self._timeline is not None:
            self._timeline.stop()
