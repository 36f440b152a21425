"""How large gradients and parameters are, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from trainwright.callbacks.monitor.records import tell
from trainwright.callbacks.steps import log_metrics, require_strategy
from trainwright.callbacks.windows import Windowed
from trainwright.core.run.traits import traits_of

REST = "rest"
"""What is in no block."""


class Norms(Windowed):
    """Log the L2 norms of the gradients and of the parameters of each block, and of the rest, once a window.

    They are those that one process would have with all of the module, however it is spread: ranks add up squares of
    what each holds, in one all-reduce of a small vector at the end of each window. Logged are ``norm/grad/<block>`` and
    ``norm/param/<block>`` (``rest``: outside of the blocks; ``all``: of the whole module); rank 0 tells a record
    ``norms`` (``grad`` and ``param`` by block). Both are of the last step of the window: gradients before they are
    clipped, parameters before the step. Parameters that are not trained count as parameters. Where replicas differ
    between two synchronisations, their squares are averaged.

    Gradients of manual optimization count if an optimizer steps on them through Lightning.

    Args:
        every_n_steps: optimizer steps of a window; ``None``: the Trainer's ``log_every_n_steps`` (there, 0 is off).

    Raises:
        ValueError: if ``every_n_steps`` is less than 1.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self.latest: dict[str, dict[str, float]] = {}
        """``grad`` and ``param`` by block, as last logged; empty before the first window has ended."""
        self._squares: Tensor | None = None  # of gradients and parameters of this rank, (2, blocks + 1)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be measured.

        Raises:
            ValueError: if the strategy is not of this project, or its ranks do not see the gradients of a step.
        """
        if stage != "fit":
            return
        require_strategy(self, trainer, "squares_by_block")
        if not traits_of(trainer.strategy).holds_step_gradients:
            raise ValueError(
                "Norms adds up what ranks hold of the averaged gradients of a step, and with "
                f"{type(trainer.strategy).__name__} they hold none of them. Leave it out, or choose another strategy."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count steps."""
        super().on_train_start(trainer, pl_module)
        self._squares = None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """In the last step of a window, square what this optimizer is about to step on; nothing is sent."""
        if not self._ends_window(self._steps.next_number(trainer)):
            return
        strategy: Any = trainer.strategy
        if self._squares is None:
            parameters = strategy.squares_by_block(pl_module.named_parameters())
            self._squares = torch.stack([torch.zeros_like(parameters), parameters])
        self._squares[0] += strategy.squares_by_block(_stepped_on(optimizer, strategy.named_gradients()))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """At the end of a window, add up and log."""
        squares, self._squares = self._squares, None
        step = self._steps.ended(trainer)
        if step is None or squares is None:
            return
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(squares)
        grad, param = squares.tolist()
        blocks: Sequence[str] = trainer.strategy.block_names  # type: ignore[attr-defined]
        self.latest = {"grad": _norms(grad, blocks), "param": _norms(param, blocks)}
        if trainer.is_global_zero:
            tell(trainer, "norms", self.latest, step + 1)
        logged = {f"norm/{what}/{block}": norm for what, each in self.latest.items() for block, norm in each.items()}
        log_metrics(trainer, logged, step)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count steps from there."""
        super().on_gone_back(trainer, pl_module)
        self._squares = None


def _stepped_on(optimizer: Optimizer, gradients: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    own = {id(gradient) for gradient in held}
    return [(name, gradient) for name, gradient in gradients if id(gradient) in own]


def _norms(squares: Sequence[float], blocks: Sequence[str]) -> dict[str, float]:
    by_block = {name: square**0.5 for name, square in zip((*blocks, REST), squares, strict=True)}
    return by_block | {"all": sum(squares) ** 0.5}
