"""Samples, units (tokens, pixels, ...) and operations per second, and the time of a step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from trainwright.callbacks.monitor.flops import CountedOperations
from trainwright.callbacks.monitor.records import tell
from trainwright.callbacks.steps import log_metrics
from trainwright.callbacks.windows import Windowed
from trainwright.core.run.traits import traits_of


class Throughput(Windowed):
    """Log ``samples_per_second`` and ``step_seconds`` of all ranks together, averaged over windows of optimizer steps;
    where ranks step by themselves (``steps_are_collective`` of its traits), of rank 0 alone.

    Where it is known what a sample consists of, ``<unit>_per_second`` too: from the arguments, or from the module's
    attributes ``sample_unit`` (such as ``"tokens"``) and ``units_per_sample``. Samples of a batch are the first
    dimension of its first tensor, wherever that is nested.

    The floating-point operations of forward and backward are counted while the first micro-batch runs
    (:class:`~trainwright.callbacks.monitor.flops.CountedOperations`), and logged as ``flops_per_second``: of one
    device, the mean of all, by the samples that it has trained on. Where it is known how many the device could do,
    ``mfu`` is the part of that. Every rank tells a record ``rate`` of what is logged, with its own operations. Where
    ranks share the experts of a model, how evenly tokens went to these is logged too
    (``strategy.measures.routing_balance()``).

    The clock begins after the first step, whose compilation and warm-up would hide the rest, and stands still during
    validation; time for saving a checkpoint or reading data counts. The device is waited for at the end of a window
    only.

    Args:
        every_n_steps: optimizer steps per window; ``None``: the Trainer's ``log_every_n_steps`` (there, 0 is off).
        unit: what a sample consists of, plural, such as ``tokens``; ``None``: the module's ``sample_unit``.
        units_per_sample: how many of them a sample has; ``None``: the module's ``units_per_sample``. Off if the module
            has none.
        count_flops: whether to count operations; ``False`` is off.
        peak_flops: most operations per second of one device; ``None``: not known, and there is no ``mfu``.

    Raises:
        ValueError: if ``every_n_steps`` or ``units_per_sample`` is less than 1, or ``peak_flops`` is not above 0.
    """

    # A strategy may have the weights of a step on their way while this one is called.
    looks_at_parameters = False

    def __init__(
        self,
        every_n_steps: int | None = None,
        unit: str | None = None,
        units_per_sample: int | None = None,
        count_flops: bool = True,
        peak_flops: float | None = None,
    ) -> None:
        super().__init__(every_n_steps)
        if units_per_sample is not None and units_per_sample < 1:
            raise ValueError(f"Throughput(units_per_sample={units_per_sample}) (allowed: 1 or more, or None)")
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"Throughput(peak_flops={peak_flops}) (allowed: operations per second above 0, or None)")
        self.unit = unit
        self.units_per_sample = units_per_sample
        self.count_flops = count_flops
        self.peak_flops = peak_flops
        self.flops_per_sample: float | None = None
        """Operations of forward and backward on this rank for one of its samples; ``None``: not counted."""
        self.latest: dict[str, float] = {}
        """What was logged last, in units per second and seconds; empty before the first window has ended."""
        self._counted: tuple[str, int] | None = None  # unit and units per sample of this run
        self._begin: float | None = None  # perf_counter() at which the running piece of the window began
        self._before = 0.0  # seconds of the window's earlier pieces
        self._samples = 0  # of this rank, in this window
        self._steps_done = 0  # in this window
        self._counting: CountedOperations | None = None
        self._counted_operations: float | None = None
        self._is_counted = True
        self._peak: float | None = None

    @property
    def rate(self) -> tuple[float, str] | None:
        """Units (or samples) per second and their name; ``None`` before the first window has ended."""
        name = "samples" if self._counted is None else self._counted[0]
        return (self.latest[f"{name}_per_second"], name) if self.latest else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count; the clock starts after the first step."""
        super().on_train_start(trainer, pl_module)
        unit = self.unit or getattr(pl_module, "sample_unit", None) or "units"
        units = self.units_per_sample or getattr(pl_module, "units_per_sample", None)
        self._counted = None if units is None else (unit, units)
        self._begin = None
        self._restart()
        self._peak = self.peak_flops
        self._is_counted = not (self.count_flops and self._window)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the operations of the first micro-batch."""
        if not self._is_counted:
            self._is_counted = True
            self._counting = CountedOperations()
            self._counting.__enter__()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """What an optimizer computes is no part of the model."""
        self._end_counting()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Count no more."""
        self._end_counting()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the samples; at the end of a window, write."""
        if not self._window:
            return
        if self._counting is not None or self._counted_operations is not None:
            self._end_counting()
            self._settle_operations(num_samples(batch))
        if self._begin is not None:
            self._samples += num_samples(batch)
        step = self._steps.ended(trainer)
        if step is None:
            return
        if self._begin is None:
            self._begin = time.perf_counter()
            return
        self._steps_done += 1
        if self._ends_window(step):
            self._write(trainer, step)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin anew: the clock starts after the next step."""
        super().on_gone_back(trainer, pl_module)
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

    def _end_counting(self) -> None:
        if self._counting is not None:
            self._counting.__exit__(None, None, None)
            self._counted_operations, self._counting = self._counting.total, None

    def _settle_operations(self, samples: int) -> None:
        operations, self._counted_operations = self._counted_operations, None
        self.flops_per_sample = operations / samples if operations and samples else None

    def _write(self, trainer: Trainer, step: int) -> None:
        assert self._begin is not None
        flops = self._samples * (self.flops_per_sample or 0.0)
        sums = torch.tensor([float(self._samples), flops], device=trainer.strategy.root_device, dtype=torch.float32)
        together = traits_of(trainer.strategy).steps_are_collective
        if together:
            sums = trainer.strategy.reduce(sums, reduce_op="sum")
        total, all_flops = sums.tolist()  # waits for the device
        now = time.perf_counter()
        seconds = self._before + now - self._begin
        self.latest = {"samples_per_second": total / seconds, "step_seconds": seconds / self._steps_done}
        if self._counted is not None:
            unit, units = self._counted
            self.latest[f"{unit}_per_second"] = total * units / seconds
        own = dict(self.latest)
        devices = trainer.world_size if together else 1
        self.latest |= self._rates(all_flops / devices, seconds)
        tell(trainer, "rate", own | self._rates(flops, seconds), step + 1)
        measures = getattr(trainer.strategy, "measures", None)  # Lightning's own strategies have none
        balance = {} if measures is None else measures.routing_balance()
        log_metrics(trainer, self.latest | balance, step)
        self._begin = now
        self._restart()

    def _rates(self, flops: float, seconds: float) -> dict[str, float]:
        if not flops:
            return {}
        rate = flops / seconds
        return {"flops_per_second": rate} | ({} if self._peak is None else {"mfu": rate / self._peak})

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
