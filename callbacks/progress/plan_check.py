"""Comparison of the first steps of a run with what its plan predicted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from torch.optim import Optimizer

from trainwright.callbacks.monitor.records import emit
from trainwright.callbacks.steps import are_synchronous, step_number
from trainwright.callbacks.windows import Measured, Timed
from trainwright.core.config.options import number, require
from trainwright.core.failures.records import write_whole

FILE = "plan.json"
_MIB = 2**20


class PlanCheck(Timed, Measured):
    """Compare step time and bytes of the fullest rank with the prediction in ``plan.json``, once.

    A run has a ``plan.json`` after ``strategy=auto`` or ``micro_batch_size=auto``. Without one, with another layout
    than the planned one (after a restart with fewer devices), or with asynchronous steps nothing is measured. Rank 0
    prints one line, adds ``measured`` to the file, and emits a ``plan`` event. Bytes are those of parameters, gradients
    (when the optimizer steps) and optimizer states; on CUDA also the peak allocation.

    Args:
        steps: optimizer steps to measure, after 2 that are not; a shorter run reports those it made.
        console: prints the line; ``None``: standard output.

    Attributes:
        measured: the result, as in the file; ``None`` before.

    Raises:
        ValueError: if ``steps`` is less than 1.
    """

    _warm_up = 2
    _gradients = 0  # bytes

    def __init__(self, steps: int = 5, console: Console | None = None) -> None:
        require(self, int, number(5, least=1, unit="optimizer steps"), steps=steps)
        super().__init__(steps)
        self.steps = steps
        self.console = console or Console()
        self.measured: dict[str, Any] | None = None
        self._plan: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the plan if it fits this layout. A collective if the run can be measured."""
        super().on_train_start(trainer, pl_module)
        self._plan = None
        if self.measured is None and _is_measurable(trainer):
            # Other machines may have their own run directory, without the file.
            self._plan = trainer.strategy.broadcast(_plan_of(trainer) if trainer.is_global_zero else None)
        self._window = 0 if self._plan is None else self.steps

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Measure gradients, which are complete now."""
        if self._window and self._done >= 0:
            self._gradients = max(self._gradients, _held(trainer).gradients)

    def _begin(self, trainer: Trainer, step: int) -> None:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        self._gradients = 0
        super()._begin(trainer, step)

    def _report(self, trainer: Trainer, step: int) -> None:
        assert self._plan is not None
        plan, self._plan, self._window = self._plan, None, 0
        seconds, held = self._most_of_any_rank(trainer)
        line = _line(seconds, held, plan["chosen"])
        done = step_number(trainer)
        self.measured = {"seconds": {"step": seconds}, "bytes": held, "steps": self._done, "until_step": done}
        self.measured["line"] = line
        if not trainer.is_global_zero:
            return
        self.console.print(line, soft_wrap=True, highlight=False, markup=False)
        plan["measured"] = self.measured
        write_whole(Path(trainer.default_root_dir, FILE), json.dumps(plan, indent=1, allow_nan=False) + "\n")
        emit(trainer, "event", {"what": "plan", "text": line, "seconds": 0.0}, step=done)

    def _most_of_any_rank(self, trainer: Trainer) -> tuple[float, dict[str, float]]:
        """Return the maximum over ranks of the step seconds and of bytes by kind. A collective."""
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = self._seconds() / self._done
        held = _held(trainer)
        found = {"parameters": held.parameters, "gradients": self._gradients, "optimizer": held.optimizer}
        if device.type == "cuda":
            found["total"] = torch.cuda.max_memory_allocated(device)
        own = torch.tensor([seconds * 1e6, *found.values()], dtype=torch.int64, device=device)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(own, op=dist.ReduceOp.MAX)
        microseconds, *sizes = own.tolist()
        return microseconds / 1e6, dict(zip(found, map(float, sizes), strict=True))


def _is_measurable(trainer: Any) -> bool:
    """Return whether steps are synchronous with batches of a known size; equal on all ranks."""
    strategy = trainer.strategy
    knows = getattr(trainer, "global_batch", None) is not None and hasattr(strategy, "measures")
    return knows and are_synchronous(trainer)


def _plan_of(trainer: Any) -> dict[str, Any] | None:
    """Return the plan for the layout and batches of this run from its file; ``None`` if there is none."""
    strategy, batch = trainer.strategy, trainer.global_batch
    try:
        plan: dict[str, Any] = json.loads(Path(trainer.default_root_dir, FILE).read_text(encoding="utf-8"))
        chosen = plan["chosen"]
        chosen["bytes_at_step"], chosen["seconds"]["step"], chosen["bytes"]["total"]
        sizes = {axis: size for axis, size in chosen["layout"].items() if axis != "expert"}
        wanted = sizes, chosen["micro_batch_size"], chosen["accumulation"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # missing, or not such a file
    return plan if (strategy.layout.sizes, batch.micro_batch_size, batch.accumulation) == wanted else None


def _held(trainer: Any) -> Any:
    return trainer.strategy.measures.held_bytes()


def _line(seconds: float, held: Mapping[str, float], predicted: Mapping[str, Any]) -> str:
    expected = predicted["seconds"]["step"]
    bytes_of = {"total": predicted["bytes"]["total"], **predicted["bytes_at_step"]}
    label = {"total": "allocated at most"}
    sizes = ", ".join(
        f"{label.get(kind, kind)} {size / _MIB:.4g} MiB (predicted {bytes_of[kind] / _MIB:.4g})"
        for kind, size in held.items()
    )
    deviation = f"{100 * (seconds / expected - 1):+.0f} %"
    return f"Plan: a step takes {seconds:.3g} s (predicted {expected:.3g}, {deviation}); of the fullest rank: {sizes}."
