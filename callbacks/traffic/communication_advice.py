"""Recommendation of a gradient averaging method for these links and this module, from a few measured steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich.console import Console

from trainwright.callbacks.step_clock import StepClock
from trainwright.callbacks.traffic.communication import Metered, Sums, add_counts
from trainwright.callbacks.windows import Clocked, Measured
from trainwright.core.config.options import number, require

FILE = "communication.json"


class CommunicationAdvice(Clocked[StepClock], Metered, Measured):
    """Measure some steps and the links between ranks once, and recommend how to average gradients.

    The Trainer adds it for a strategy with ``communication="advise"`` or ``"auto"``. It averages step times over ranks,
    has the strategy measure its links, prints three lines and writes ``communication.json`` in the run directory. It
    changes nothing, and costs nothing afterwards.

    Args:
        after_steps: optimizer steps to measure, after 3 that are not; a shorter run reports those it made.
        console: prints; ``None``: standard output.

    Attributes:
        advice: the result (:class:`~trainwright.strategies.contract.communication.advice.Advice`); ``None`` before.

    Raises:
        ValueError: if ``after_steps`` is less than 1.
    """

    _warm_up = 3
    needs_collective_steps = True
    """All ranks must be at the same optimizer step."""

    def __init__(self, after_steps: int = 20, console: Console | None = None) -> None:
        require(self, int, number(20, least=1, unit="optimizer steps"), after_steps=after_steps)
        super().__init__(after_steps)
        self.after_steps = after_steps
        self.console = console or Console()
        self.advice: Any = None
        self._sent: Sums = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise a ``ValueError`` if the strategy does not average gradients at every step, or is one of Lightning."""
        strategy: Any = trainer.strategy
        advises = getattr(getattr(strategy, "averaging", None), "advises", False)
        can = advises and strategy.traits.averages_every_step and hasattr(trainer, "phases")
        if stage == "fit" and not can:
            raise ValueError(
                f"CommunicationAdvice needs gradients averaged at every step, which {type(strategy).__name__} does not "
                "do; use trainwright.Trainer with strategy='ddp', 'zero2', 'hybrid', ..."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring, if there are several ranks."""
        if trainer.world_size == 1:
            self.console.print("Communication: a single rank sends nothing; there is nothing to recommend.")
            return
        super().on_train_start(trainer, pl_module)
        self._meter = trainer.strategy.measures.measure_communication()  # type: ignore[attr-defined]
        self._clock = StepClock(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Ignore what was sent since the last micro-batch."""
        if self._meter is not None:
            self._meter.take()

    def on_train_batch_end(self, *args: Any) -> None:
        """Count; report after enough steps, in a collective."""
        if self._meter is not None:
            add_counts(self._sent, self._meter.take())
            super().on_train_batch_end(*args)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a shorter run; a collective if a step was measured."""
        if self._clock is not None and self._done <= 0:
            rank_zero_warn(f"Communication: no advice, which needs more than {self._warm_up} optimizer steps.")
        super().on_train_end(trainer, pl_module)
        self._stop()

    def _begin(self, trainer: Trainer, step: int) -> None:
        self._running_clock.take(wait_for_device=True)
        self._sent = {}

    def _report(self, trainer: Trainer, step: int) -> None:
        compute, _, _, waits = self._running_clock.take(wait_for_device=True)
        done = self._done
        self._stop()  # before links are measured
        strategy: Any = trainer.strategy
        own = torch.tensor([compute / done, waits / done], dtype=torch.float32, device=strategy.root_device)
        dist.all_reduce(own)
        compute, waits = (own / dist.get_world_size()).tolist()
        sent = {key: (calls / done, size / done) for key, (calls, size, _) in self._sent.items()}
        self.advice = strategy.averaging.advise(compute, waits, trainer.accumulate_grad_batches, sent)
        if not trainer.is_global_zero:
            return
        for line in self.advice.lines():
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)
        path = Path(trainer.default_root_dir, FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.advice.as_dict(), indent=2) + "\n")
