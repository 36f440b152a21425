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
    """Writes ``certificate.json`` into the run directory and records an event, after each comparison.

    The file holds the layout, whether the numbers agree, losses, the largest gradient difference and the names of
    parameters that differ, of the last comparison or of the first that failed (see ``Comparison``), and a list of all
    ``checks`` with their steps and reasons. A resumed run continues the list. Nothing is written without a certificate
    (one process, ``certificate="off"``, a resumed run that was already certified).

    Args:
        console: prints one line; ``None``: standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._last: Any = None
        self._records: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Record a comparison made before this step."""
        self._record(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Record a comparison that failed the run."""
        self._record(trainer)

    def _record(self, trainer: Trainer) -> None:
        checks = getattr(getattr(trainer.strategy, "certificate", None), "checks", [])
        if not checks or checks[-1] is self._last:
            return
        self._last = check = checks[-1]
        if not trainer.is_global_zero:
            return
        shown = next((each for each in checks if not each.outcome.holds), check)
        path = Path(trainer.default_root_dir, FILE)
        self._records = [*(self._records or _earlier(path)), check.record()]
        document: dict[str, Any] = {"layout": str(trainer.strategy.layout)}  # type: ignore[attr-defined]
        document |= {**shown.outcome.record(), "checks": self._records}
        write_whole(path, json.dumps(document, indent=1) + "\n")
        text = f"{'certified' if check.outcome.holds else 'not certified'}: {check.summary()}"
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)
        emit(trainer, "event", {"what": "certificate", "text": text, "seconds": check.outcome.seconds}, check.step)


def _earlier(path: Path) -> list[Any]:
    """Return the checks of attempts that this run resumes in its directory."""
    try:
        return list(json.loads(path.read_text())["checks"])
    except (OSError, ValueError, KeyError):  # none, damaged, or of an earlier version
        return []
