"""The record of a run's certificate in its run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console

from trainwright.callbacks.monitor.records import emit
from trainwright.core.failures.records import write_whole

FILE = "certificate.json"


class CertificateRecord(Callback):
    """Writes ``certificate.json`` into the run directory and records an event, once a certificate exists.

    The file holds the layout, whether the numbers agree, losses, the largest gradient difference and the names of
    parameters that differ; see ``Comparison``. Nothing is written without a certificate (one process,
    ``certificate="off"``, a resumed run that was already certified).

    Args:
        console: prints one line; ``None``: standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._written: Any = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Record a certificate made before this step."""
        self._record(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Record a certificate that failed the run."""
        self._record(trainer)

    def _record(self, trainer: Trainer) -> None:
        outcome = getattr(getattr(trainer.strategy, "certificate", None), "outcome", None)
        if outcome is None or outcome is self._written:
            return
        self._written = outcome
        if not trainer.is_global_zero:
            return
        document = {"layout": str(trainer.strategy.layout), **outcome.record()}  # type: ignore[attr-defined]
        write_whole(Path(trainer.default_root_dir, FILE), json.dumps(document, indent=1) + "\n")
        text = f"certified: {outcome.summary()}" if outcome.holds else f"not certified: {outcome.problem()}"
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)
        emit(trainer, "event", {"what": "certificate", "text": text, "seconds": outcome.seconds})
