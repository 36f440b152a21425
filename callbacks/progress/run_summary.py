"""How a run ended, in one small file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich.console import Console

from trainwright.callbacks.end.preemption import Preempted
from trainwright.callbacks.progress.global_loss import losses_of
from trainwright.callbacks.steps import steps_done
from trainwright.core.failures.records import write_whole

FILE = "summary.json"


class RunSummary(Callback):
    """Keep ``summary.json`` in the run directory, and say at the end of a run that it diverged.

    The file holds ``status``, ``steps`` (optimizer steps done), ``loss`` (of the last step, ``null`` if it is not
    finite), ``diverged`` (``null``, or the ``step``, ``loss`` and ``ranks`` of the first loss that was not finite) and
    ``error`` (``null``, or its first line). The status is ``running``, ``finished``, ``diverged``, ``preempted`` or
    ``failed``; a process that was killed leaves ``running``. Losses are those of
    ``GlobalLoss``, which should stand before it; without it they are unknown.

    Args:
        console: where to print; ``None``: standard output.
    """

    looks_at_parameters = False

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace what an earlier attempt has left."""
        self._write(trainer, "running")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write how it ended."""
        self._write(trainer, "finished")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write with what it ended."""
        lines = str(exception).splitlines()
        error = f"{type(exception).__name__}: {lines[0]}" if lines else type(exception).__name__
        self._write(trainer, "preempted" if isinstance(exception, Preempted) else "failed", error)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say it where the run's last lines are."""
        losses = losses_of(trainer)
        if losses is not None and losses.diverged is not None and trainer.is_global_zero:
            text = f"Diverged:      {losses.diverged}, the first that is not finite"
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def _write(self, trainer: Trainer, status: str, error: str | None = None) -> None:
        if not trainer.is_global_zero:
            return
        losses = losses_of(trainer)
        diverged = None if losses is None else losses.diverged
        loss = None if losses is None or losses.latest is None or not math.isfinite(losses.latest) else losses.latest
        document: dict[str, Any] = {
            "status": "diverged" if diverged is not None and status == "finished" else status,
            "steps": steps_done(trainer),
            "loss": loss,
            "diverged": None if diverged is None else {**vars(diverged), "loss": str(diverged.loss)},
            "error": error,
        }
        path = Path(trainer.default_root_dir, FILE)
        try:
            write_whole(path, json.dumps(document, indent=1) + "\n")
        except OSError as error:  # a run does not fail for that, and its own error is not to be hidden
            rank_zero_warn(f"RunSummary: {path} cannot be written: {error.strerror}. The run goes on without it.")
