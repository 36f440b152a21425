"""A callback that tells the benchmark of every step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from benchmarks.peers.task import restrict_attention
from benchmarks.peers.turns import Turns


class TurnsCallback(pl.Callback):
    """Calls :meth:`Turns.step` with the step's loss."""

    def __init__(self) -> None:
        self._turns: Turns | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Connect; each rank by itself."""
        restrict_attention()
        self._turns = Turns()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        """A step has ended."""
        assert self._turns is not None
        self._turns.step(outputs["loss"] if isinstance(outputs, dict) else outputs)
