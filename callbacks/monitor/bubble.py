"""How long the stages of a pipeline stand idle."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from trainwright.callbacks.monitor.records import tell
from trainwright.callbacks.steps import log_metrics
from trainwright.callbacks.windows import Measuring, Windowed


class Bubble(Measuring, Windowed):
    """Log the part of a step for which the rank's stages of a pipeline stand idle, as ``pipeline/idle_share``.

    One step of each window is looked at, its last: when each forward and backward of a micro-batch began and ended. The
    first micro-batches of that step are, where a step accumulates. Every rank tells a record ``bubble``: ``busy`` and
    ``idle`` (seconds), ``began`` (unix seconds) and ``timeline``, a list of ``[begin, end, what, micro_batch, stage]``,
    see ``Entry``. Nothing is communicated. Without a pipeline nothing is
    told, and it costs nothing.

    Args:
        every_n_steps: optimizer steps of a window; ``None``: the Trainer's ``log_every_n_steps`` (there, 0 is off).

    Raises:
        ValueError: if ``every_n_steps`` is less than 1.
    """

    looks_at_parameters = False

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self.latest: dict[str, Any] = {}
        """What was told last; empty before the first window has ended."""
        self._timeline: Any = None
        self._step: int | None = None  # that is being looked at
        self._began = 0.0
        self._is_looking = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See whether there is a pipeline."""
        super().on_train_start(trainer, pl_module)
        measures = getattr(trainer.strategy, "measures", None)  # Lightning's own strategies have none
        self._timeline = None if measures is None else measures.pipeline_timeline()
        if self._timeline is None:
            self._window = 0
        self._step = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """In the last step of a window, begin to look."""
        if not self._window:
            return
        step = self._steps.next_number(trainer)
        if self._ends_window(step) and step != self._step:
            self._step, self._began, self._is_looking = step, time.time(), True
            self._timeline.start()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """From here on the optimizer works."""
        if self._is_looking:
            self._timeline.optimizer()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Tell, if this was looked at."""
        if self._step is None or not self._is_looking:
            return
        self._is_looking = False
        self._timeline.stop()
        seconds, entries = self._timeline.take()
        busy = sum(each.end - each.begin for each in entries)
        idle = max(seconds - busy, 0.0)
        timeline = [list(each) for each in entries]
        self.latest = {"busy": busy, "idle": idle, "began": self._began, "timeline": timeline}
        tell(trainer, "bubble", self.latest, self._step + 1)
        log_metrics(trainer, {"pipeline/idle_share": idle / max(seconds, 1e-9)}, self._step)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look anew."""
        self._stop()
        super().on_gone_back(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Look no more."""
        super().teardown(trainer, pl_module, stage)
        self._timeline = None

    def _stop(self) -> None:
        self._step, self._is_looking = None, False
        if self._timeline is not None:
            self._timeline.stop()
