"""Weights & Biases, in a run that may be started again and leaves no process behind."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

# Otherwise wandb keeps the words of the command, secrets among them, copies the terminal, and loses the last 15 s of a
# process that is killed.
_SETTINGS = {"console": "off", "quiet": True, "x_disable_meta": True, "x_transaction_log_flush_interval": 1.0}


class Wandb(WandbLogger):
    """Lightning's ``WandbLogger``, which finishes its run when the Trainer is done and ends wandb's service process.

    Args:
        mode: ``online``, ``offline`` or ``disabled``; `None`: as the variable ``WANDB_MODE`` says, else ``online``.
        settings: of wandb, beside those that keep secrets and the terminal out.
        **options: of Lightning's logger and of ``wandb.init``.
    """

    def __init__(self, mode: Any = None, settings: Mapping[str, Any] | None = None, **options: Any) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        silent = {"silent": mode in ("offline", "disabled", "dryrun")}  # it would say how to log in
        super().__init__(mode=mode, settings={**_SETTINGS, **silent, **(settings or {})}, **options)
        if self._wandb_init.get("anonymous") is None:
            self._wandb_init.pop("anonymous", None)  # of which wandb warns

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
        """Return the options that lead to the same run, and under ``at`` where it is; {} where wandb is disabled."""
        run = self.experiment
        if run.disabled:
            return {}
        at = f"{run.project}/{run.id}, offline in {Path(run.dir).parent}" if run.offline else str(run.url)
        return {"id": run.id, "at": at}

    def link(self, report: str) -> None:
        """Name the report in the summary of the run."""
        self.experiment.summary["report"] = report
