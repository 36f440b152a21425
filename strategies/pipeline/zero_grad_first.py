"""Automatic optimization for strategies whose ``training_step`` includes backward."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.trainer import call

from trainwright.core.lightning_internals import _AutomaticOptimization


class ZeroGradFirst(_AutomaticOptimization):
    """Lightning's automatic optimization with ``optimizer_zero_grad`` before ``training_step`` instead of after it.

    ``on_before_zero_grad``, which may update what the step reads (an average of the weights), stays after it.
    """

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Closure:
        starts = self._make_zero_grad_fn(batch_idx, optimizer) is not None  # else gradients accumulate
        trainer = self.trainer

        def step() -> ClosureResult:
            if starts:
                call._call_lightning_module_hook(
                    trainer, "optimizer_zero_grad", trainer.current_epoch, batch_idx, optimizer
                )
            output = self._training_step(kwargs)
            if starts:
                call._call_callback_hooks(trainer, "on_before_zero_grad", optimizer)
                call._call_lightning_module_hook(trainer, "on_before_zero_grad", optimizer)
            return output

        return Closure(step_fn=step, backward_fn=self._make_backward_fn(optimizer))


def optimize_after_zero_grad(trainer: Trainer) -> None:
    """Replace Lightning's automatic optimization; custom ones are expected to read the strategy's
    ``backward_in_step``.
    """
    loop = trainer.fit_loop.epoch_loop
    if type(loop.automatic_optimization) is _AutomaticOptimization:
        old, loop.automatic_optimization = loop.automatic_optimization, ZeroGradFirst(trainer)
        loop.automatic_optimization.optim_progress = old.optim_progress
