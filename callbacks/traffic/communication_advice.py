"""Which way to average gradients fits these links and this module: measured in a few steps, said in three lines."""

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
from trainwright.callbacks.steps import StepCounter, require_window
from trainwright.callbacks.windows import Measuring

# Steps at the beginning that are left out: they compile, warm caches and make connections.
_WARM_UP = 3
FILE = "communication.json"


class CommunicationAdvice(Measuring):
    """Measure some steps and the links between ranks, once, and recommend how to average gradients.

    The Trainer has one where its strategy was made with ``communication="advise"`` or ``"auto"``. It listens to the
    first steps, averages over the ranks what they took, has the strategy measure its links, prints three lines and
    writes all of it into ``communication.json`` in the run directory. Then it is done and costs nothing. It changes
    nothing.

    Args:
        after_steps: optimizer steps that are measured, behind 3 that are not. A shorter run tells of those it made.
        console: where to print; ``None``: standard output.

    Raises:
        ValueError: if ``after_steps`` is less than 1.
    """

    needs_collective_steps = True
    """Whether it needs all ranks at the same optimizer step."""

    def __init__(self, after_steps: int = 20, console: Console | None = None) -> None:
        require_window(after_steps, self)
        self.after_steps = after_steps
        self.console = console or Console()
        self.advice: Any = None
        """What came of it (:class:`~trainwright.strategies.contract.communication.advice.Advice`); ``None`` before."""
        self._steps = StepCounter()
        self._done = -_WARM_UP
        self._clock: StepClock | None = None
        self._meter: Any = None
        self._sent: dict[tuple[str, str], tuple[float, float]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be compared.

        Raises:
            ValueError: if gradients are not averaged at every step by a strategy of this project.
        """
        strategy: Any = trainer.strategy
        advises = getattr(getattr(strategy, "averaging", None), "advises", False)
        can = advises and strategy.traits.averages_every_step and hasattr(trainer, "phases")
        if stage == "fit" and not can:
            raise ValueError(
                "CommunicationAdvice compares ways to average gradients at every step, which "
                f"{type(strategy).__name__} does not do; use trainwright.Trainer with strategy='ddp', 'zero2', "
                "'hybrid', ..."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure, if there are other ranks."""
        if trainer.world_size == 1:
            self.console.print("Communication: one rank alone sends nothing; there is nothing to recommend.")
            return
        strategy: Any = trainer.strategy
        self._steps.start(trainer)
        self._done, self._sent = -_WARM_UP, {}
        self._meter = strategy.measures.measure_communication()
        self._clock = StepClock(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """What was sent since the last micro-batch is no part of a step."""
        if self._meter is not None:
            self._meter.take()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Count; when enough steps are measured, tell. A collective then."""
        if self._clock is None:
            return
        for key, each in self._meter.take().items():
            calls, sent = self._sent.get(key, (0.0, 0.0))
            self._sent[key] = (calls + each.calls, sent + each.bytes)
        if self._steps.ended(trainer) is None:
            return
        self._done += 1
        if self._done == 0:
            self._clock.take(wait_for_device=True)
            self._sent = {}
        elif self._done == self.after_steps:
            self._tell(trainer)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin anew, after a step that is left out."""
        self._steps.start(trainer)
        self._done, self._sent = -_WARM_UP, {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell of a run that was shorter; a collective, if there was a step to measure."""
        if self._clock is None:
            return
        if self._done > 0:
            self._tell(trainer)
        else:
            rank_zero_warn(f"Communication: no advice, for that takes more than {_WARM_UP} optimizer steps.")
            self._stop()

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.stop()
            self._meter.stop()
            self._clock = self._meter = None

    def _tell(self, trainer: Trainer) -> None:
        assert self._clock is not None
        compute, _, _, waits = self._clock.take(wait_for_device=True)
        done = self._done
        self._stop()  # the links are measured without anybody who listens
        strategy: Any = trainer.strategy
        own = torch.tensor([compute / done, waits / done], dtype=torch.float32, device=strategy.root_device)
        dist.all_reduce(own)
        compute, waits = (own / dist.get_world_size()).tolist()
        sent = {key: (calls / done, size / done) for key, (calls, size) in self._sent.items()}
        self.advice = strategy.averaging.advise(compute, waits, trainer.accumulate_grad_batches, sent)
        if not trainer.is_global_zero:
            return
        for line in self.advice.lines():
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)
        path = Path(trainer.default_root_dir, FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.advice.as_dict(), indent=2) + "\n")
