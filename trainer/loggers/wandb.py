"""Weights & Biases logger for a run that may be restarted, and which leaves no process behind."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

# Otherwise wandb records the command line with its secrets, captures the terminal, and loses the last 15 s of a killed
# process.
_SETTINGS = {"console": "off", "quiet": True, "x_disable_meta": True, "x_transaction_log_flush_interval": 1.0}


class Wandb(WandbLogger):
    """Lightning's ``WandbLogger``, which finishes its run with the Trainer and ends wandb's service process.

    Args:
        mode: ``online``, ``offline`` or ``disabled``; `None`: the variable ``WANDB_MODE``, else ``online``.
        settings: of wandb, in addition to those that keep secrets and the terminal out.
        **options: of Lightning's logger and of ``wandb.init``.
    """

    def __init__(self, mode: Any = None, settings: Mapping[str, Any] | None = None, **options: Any) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        silent = {"silent": mode in ("offline", "disabled", "dryrun")}  # suppresses the hint to log in
        super().__init__(mode=mode, settings={**_SETTINGS, **silent, **(settings or {})}, **options)
        if self._wandb_init.get("anonymous") is None:
            self._wandb_init.pop("anonymous", None)  # wandb warns of it

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Finish the run; logging more values resumes it."""
        import wandb

        try:
            super().finalize(status)
        finally:
            run, self._experiment = self._experiment, None
            if run is not None:
                self._id = self._wandb_init["id"] = run.id
                run.finish(exit_code=0 if status == "success" else 1)
            if wandb.run is None:
                wandb.teardown()

    def identify(self) -> dict[str, str]:
        """Return the options that resume the run, and its location under ``at``; {} if wandb is disabled."""
        run = self.experiment
        if run.disabled:
            return {}
        at = f"{run.project}/{run.id}, offline in {Path(run.dir).parent}" if run.offline else str(run.url)
        return {"id": run.id, "at": at}

    def link(self, report: str) -> None:
        """Add the report's path to the summary of the run."""
        self.experiment.summary["report"] = report
