"""Samples and units (tokens, pixels, ...) per second, and the time of a step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from trainwright.callbacks.steps import StepCounter, log_metrics, require_window, window_steps


class Throughput(Callback):
    """Log ``samples_per_second`` and ``step_seconds`` of all ranks together, averaged over windows of optimizer steps.

    Where it is known what a sample consists of, ``<unit>_per_second`` too: from the arguments, or from the module's
    attributes ``sample_unit`` (such as ``"tokens"``) and ``units_per_sample``. Samples of a batch are the first
    dimension of its first tensor, wherever that is nested.

    The clock begins after the first step, whose compilation and warm-up would hide the rest, and stands still during
    validation; time for saving a checkpoint or reading data counts. The device is waited for at the end of a window
    only.

    Args:
        every_n_steps: optimizer steps per window; ``None``: the Trainer's ``log_every_n_steps`` (there, 0 is off).
        unit: what a sample consists of, plural, such as ``tokens``; ``None``: the module's ``sample_unit``.
        units_per_sample: how many of them a sample has; ``None``: the module's ``units_per_sample``. Off if the module
            has none.

    Raises:
        ValueError: if ``every_n_steps`` or ``units_per_sample`` is less than 1.
    """

    # A strategy may have the weights of a step on their way while this one is called.
    looks_at_parameters = False

    def __init__(
        self, every_n_steps: int | None = None, unit: str | None = None, units_per_sample: int | None = None
    ) -> None:
        require_window(every_n_steps, self)
        if units_per_sample is not None and units_per_sample < 1:
            raise ValueError(f"Throughput(units_per_sample={units_per_sample}) (allowed: 1 or more, or None)")
        self.every_n_steps = every_n_steps
        self.unit = unit
        self.units_per_sample = units_per_sample
        self.latest: dict[str, float] = {}
        """What was logged last, in units per second and seconds; empty before the first window has ended."""
        self._counted: tuple[str, int] | None = None  # unit and units per sample of this run
        self._steps = StepCounter()
        self._window = 0
        self._begin: float | None = None  # perf_counter() at which the running piece of the window began
        self._before = 0.0  # seconds of the window's earlier pieces
        self._samples = 0  # of this rank, in this window
        self._steps_done = 0  # in this window

    @property
    def rate(self) -> tuple[float, str] | None:
        """Units (or samples) per second and their name; ``None`` before the first window has ended."""
        name = "samples" if self._counted is None else self._counted[0]
        return (self.latest[f"{name}_per_second"], name) if self.latest else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count; the clock starts after the first step."""
        self._steps.start(trainer)
        self._window = window_steps(self.every_n_steps, trainer)
        unit = self.unit or getattr(pl_module, "sample_unit", None) or "units"
        units = self.units_per_sample or getattr(pl_module, "units_per_sample", None)
        self._counted = None if units is None else (unit, units)
        self._begin = None
        self._restart()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the samples; at the end of a window, write."""
        if not self._window:
            return
        if self._begin is not None:
            self._samples += num_samples(batch)
        step = self._steps.ended(trainer)
        if step is None:
            return
        if self._begin is None:
            self._begin = time.perf_counter()
            return
        self._steps_done += 1
        if (step + 1) % self._window == 0:
            self._write(trainer, step)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin anew: the clock starts after the next step."""
        self._steps.start(trainer)
        self._begin = None
        self._restart()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        if self._begin is not None:
            self._before += time.perf_counter() - self._begin

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the clock go on."""
        if self._begin is not None:
            self._begin = time.perf_counter()

    def _write(self, trainer: Trainer, step: int) -> None:
        assert self._begin is not None
        samples = torch.tensor(float(self._samples), device=trainer.strategy.root_device, dtype=torch.float32)
        total = float(trainer.strategy.reduce(samples, reduce_op="sum"))  # waits for the device
        now = time.perf_counter()
        seconds = self._before + now - self._begin
        self.latest = {"samples_per_second": total / seconds, "step_seconds": seconds / self._steps_done}
        if self._counted is not None:
            unit, units = self._counted
            self.latest[f"{unit}_per_second"] = total * units / seconds
        log_metrics(trainer, self.latest, step)
        self._begin = now
        self._restart()

    def _restart(self) -> None:
        self._before, self._samples, self._steps_done = 0.0, 0, 0


def num_samples(batch: Any) -> int:
    """First dimension of the first tensor in ``batch``; 1 for a 0-d tensor, 0 if there is no tensor."""
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, Sequence) or isinstance(batch, str):
        return 0
    return next((size for size in map(num_samples, batch) if size), 0)
