"""Writes down when a process has made its first optimizer step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from benchmarks.peers.moment import write_moment


class FirstStep(pl.Callback):
    """Writes the moment after the first optimizer step, once per rank."""

    _written = False

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Write if this was the first step."""
        if not self._written and trainer.global_step >= 1:
            self._written = True
            write_moment()
