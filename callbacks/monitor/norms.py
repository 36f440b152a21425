"""Norms of gradients and parameters by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from trainwright.callbacks.monitor.records import emit
from trainwright.callbacks.steps import log_metrics, require_strategy
from trainwright.callbacks.windows import Windowed
from trainwright.core.run.traits import traits_of

REST = "rest"
"""Key of what is in no block."""


class Norms(Windowed):
    """Log the L2 norms of gradients and parameters of each block and of the rest, once per window.

    Norms are those of the whole module under any layout: ranks sum squares of their parts in one small all-reduce per
    window. Logged are ``norm/grad/<block>`` and ``norm/param/<block>`` (``rest``: outside of blocks; ``all``: the
    module); rank 0 emits a ``norms`` record (``grad`` and ``param`` by block). Both belong to the last step of the
    window: gradients before clipping, parameters before the step, frozen ones included. Replicas that differ between
    synchronizations are averaged.

    Gradients of manual optimization count if an optimizer steps on them through Lightning.

    Args:
        every_n_steps: optimizer steps of a window; ``None``: the Trainer's ``log_every_n_steps`` (where 0 is off).

    Attributes:
        latest: ``grad`` and ``param`` by block, as last logged; empty before the first window has ended.

    Raises:
        ValueError: if ``every_n_steps`` is less than 1.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self.latest: dict[str, dict[str, float]] = {}
        self._squares: Tensor | None = None  # of gradients and parameters of this rank, (2, blocks + 1)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise a ``ValueError`` for a strategy of Lightning, or one whose ranks hold no gradients of a step."""
        if stage != "fit":
            return
        require_strategy(self, trainer, "squares_by_block")
        if not traits_of(trainer.strategy).holds_step_gradients:
            raise ValueError(
                "Norms needs the averaged gradients of a step, which ranks do not hold with "
                f"{type(trainer.strategy).__name__}. Leave it out, or choose another strategy."
            )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Square the gradients of this optimizer locally, in the last step of a window."""
        if not self._in_last_step(trainer):
            return
        strategy: Any = trainer.strategy
        if self._squares is None:
            parameters = strategy.squares_by_block(pl_module.named_parameters())
            self._squares = torch.stack([torch.zeros_like(parameters), parameters])
        held = {id(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        gradients = [(name, gradient) for name, gradient in strategy.named_gradients() if id(gradient) in held]
        self._squares[0] += strategy.squares_by_block(gradients)

    def on_train_batch_end(self, *args: Any) -> None:
        """At the end of a window, reduce and log."""
        super().on_train_batch_end(*args)
        self._squares = None  # if the step was dropped

    def _report(self, trainer: Trainer, step: int) -> None:
        squares = self._squares
        if squares is None:
            return
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(squares)
        grad, param = squares.tolist()
        blocks: Sequence[str] = trainer.strategy.block_names  # type: ignore[attr-defined]
        self.latest = {"grad": _norms(grad, blocks), "param": _norms(param, blocks)}
        if trainer.is_global_zero:
            emit(trainer, "norms", self.latest, step + 1)
        logged = {f"norm/{what}/{block}": norm for what, each in self.latest.items() for block, norm in each.items()}
        log_metrics(trainer, logged, step)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from the restored step."""
        super().on_gone_back(trainer, pl_module)
        self._squares = None


def _norms(squares: Sequence[float], blocks: Sequence[str]) -> dict[str, float]:
    by_block = {name: square**0.5 for name, square in zip((*blocks, REST), squares, strict=True)}
    return by_block | {"all": sum(squares) ** 0.5}
