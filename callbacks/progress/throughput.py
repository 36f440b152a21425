"""Throughput (samples, units such as tokens, FLOPs) and step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from trainwright.callbacks.monitor.flops import CountedOperations
from trainwright.callbacks.monitor.records import publish
from trainwright.callbacks.steps import are_synchronous
from trainwright.callbacks.windows import Timed
from trainwright.core.config.options import number, require


class Throughput(Timed):
    """Log ``samples_per_second`` and ``step_seconds`` over windows of optimizer steps: of all ranks together, or of
    rank 0 if steps are asynchronous (trait ``steps_are_collective`` is false).

    ``<unit>_per_second`` is logged too if the unit is known from the arguments or from the module's attributes
    ``sample_unit`` (such as ``"tokens"``) and ``units_per_sample``. The samples of a batch are the first dimension of
    its first tensor, however nested.

    FLOPs of forward and backward are counted during the first micro-batch
    (:class:`~trainwright.callbacks.monitor.flops.CountedOperations`) and logged as ``flops_per_second``, the mean per
    device; ``mfu`` is its fraction of ``peak_flops``. Every rank emits a ``rate`` record with its own FLOPs. The
    balance of tokens over experts (``strategy.measures.routing_balance()``) is logged too.

    The clock starts after the first step (compilation, warm-up) and pauses during validation; saving a checkpoint and
    reading data count. The device is synchronized only at the end of a window.

    Args:
        every_n_steps: optimizer steps per window; ``None``: the Trainer's ``log_every_n_steps`` (where 0 is off).
        unit: plural name of what a sample consists of, such as ``tokens``; ``None``: the module's ``sample_unit``.
        units_per_sample: ``None``: the module's ``units_per_sample``; off if the module has none.
        count_flops: ``False`` is off.
        peak_flops: peak FLOP/s of one device; ``None``: unknown, no ``mfu``.

    Attributes:
        flops_per_sample: FLOPs of forward and backward per sample of this rank; ``None``: not counted.
        latest: values logged last; empty before the end of the first window.

    Raises:
        ValueError: if ``every_n_steps`` or ``units_per_sample`` is less than 1, or ``peak_flops`` is not above 0.
    """

    # The strategy may still be receiving the weights of this step.
    looks_at_parameters = False
    _warm_up = 1

    def __init__(
        self,
        every_n_steps: int | None = None,
        unit: str | None = None,
        units_per_sample: int | None = None,
        count_flops: bool = True,
        peak_flops: float | None = None,
    ) -> None:
        super().__init__(every_n_steps)
        require(self, int | None, number(None, least=1), units_per_sample=units_per_sample)
        require(self, float | None, number(None, above=0, unit="operations per second"), peak_flops=peak_flops)
        self.unit = unit
        self.units_per_sample = units_per_sample
        self.count_flops = count_flops
        self.peak_flops = peak_flops
        self.flops_per_sample: float | None = None
        self.latest: dict[str, float] = {}
        self._counted: tuple[str, int] | None = None  # unit and units per sample of this run
        self._samples = 0  # of this rank, in this window
        self._counting = ExitStack()
        self._operations: CountedOperations | None = None  # of the micro-batch that is counted
        self._counts_next = False

    @property
    def rate(self) -> tuple[float, str] | None:
        """Units (or samples) per second and their name; ``None`` before the end of the first window."""
        name = "samples" if self._counted is None else self._counted[0]
        return (self.latest[f"{name}_per_second"], name) if self.latest else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset; the clock starts after the first step."""
        super().on_train_start(trainer, pl_module)
        unit = self.unit or getattr(pl_module, "sample_unit", None) or "units"
        units = self.units_per_sample or getattr(pl_module, "units_per_sample", None)
        self._counted = None if units is None else (unit, units)
        self._counts_next = bool(self.count_flops and self._window)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count FLOPs of the first micro-batch."""
        if self._counts_next:
            self._counts_next = False
            self._operations = self._counting.enter_context(CountedOperations())

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Stop counting before the optimizer computes."""
        self._counting.close()

    on_exception = on_before_optimizer_step  # type: ignore[assignment]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count samples; log at the end of a window."""
        if not self._window:
            return
        if self._operations is not None:
            self._counting.close()
            operations, self._operations = self._operations.total, None
            samples = num_samples(batch)
            self.flops_per_sample = operations / samples if operations and samples else None
        self._samples += num_samples(batch)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _begin(self, trainer: Trainer, step: int) -> None:
        super()._begin(trainer, step)
        self._samples = 0

    def _report(self, trainer: Trainer, step: int) -> None:
        flops = self._samples * (self.flops_per_sample or 0.0)
        sums = torch.tensor([float(self._samples), flops], device=trainer.strategy.root_device, dtype=torch.float32)
        together = are_synchronous(trainer)
        if together:
            sums = trainer.strategy.reduce(sums, reduce_op="sum")
        total, all_flops = sums.tolist()  # synchronizes the device
        seconds = self._seconds()
        self._begin(trainer, step)
        self.latest = {"samples_per_second": total / seconds, "step_seconds": seconds / self._done}
        if self._counted is not None:
            unit, units = self._counted
            self.latest[f"{unit}_per_second"] = total * units / seconds
        own = dict(self.latest)
        devices = trainer.world_size if together else 1
        self.latest |= self._rates(all_flops / devices, seconds)
        measures = getattr(trainer.strategy, "measures", None)  # absent on Lightning's own strategies
        balance = {} if measures is None else measures.routing_balance()
        publish(trainer, step, "rate", own | self._rates(flops, seconds), self.latest | balance)

    def _rates(self, flops: float, seconds: float) -> dict[str, float]:
        if not flops:
            return {}
        rate = flops / seconds
        return {"flops_per_second": rate} | ({} if self.peak_flops is None else {"mfu": rate / self.peak_flops})


def num_samples(batch: Any) -> int:
    """Return the first dimension of the first tensor in ``batch``; 1 for a 0-d tensor, 0 without a tensor."""
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, Sequence) or isinstance(batch, str):
        return 0
    return next((size for size in map(num_samples, batch) if size), 0)
