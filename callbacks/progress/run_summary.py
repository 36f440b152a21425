"""Summary file of a run."""

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
from trainwright.core.failures.error_text import named_line
from trainwright.core.failures.records import write_whole

FILE = "summary.json"


class RunSummary(Callback):
    """Keeps ``summary.json`` in the run directory, and reports divergence at the end of a run.

    The file holds ``status``, ``steps`` (optimizer steps done), ``loss`` (of the last step, ``null`` if not finite),
    ``diverged`` (``null``, or ``step``, ``loss`` and ``ranks`` of the first non-finite loss) and ``error`` (``null``,
    or its first line). The status is ``running``, ``finished``, ``diverged``, ``preempted`` or ``failed``; a killed
    process leaves ``running``. Losses come from ``GlobalLoss``, which should precede it in the list of callbacks.

    Args:
        console: prints; ``None``: standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Overwrite the file of an earlier attempt."""
        self._write(trainer, "running")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the final status."""
        self._write(trainer, "finished")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the error."""
        self._write(trainer, "preempted" if isinstance(exception, Preempted) else "failed", named_line(exception))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print divergence next to the run's last lines."""
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
        except OSError as error:  # must not fail the run, nor hide its own error
            rank_zero_warn(f"RunSummary: {path} cannot be written: {error.strerror}. The run continues without it.")
