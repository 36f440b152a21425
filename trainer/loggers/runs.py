"""Runs of tracking services that belong to a run directory: recorded, resumed, and linked with the report."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from trainwright.core.failures.records import write_whole
from trainwright.trainer.loggers.lenient import LenientLogger
from trainwright.trainer.loggers.mlflow import MLFlow
from trainwright.trainer.loggers.wandb import Wandb

FILE = "loggers.json"
_REPORT = "report.html"
NEW = "new"
# Options that are taken from a resumed run, and their allowed values, as the file may be untrusted.
_OPTIONS = {
    "id": re.compile(r"[\w-]{1,128}"),
    "run_id": re.compile(r"[\w-]{1,128}"),
    "tracking_uri": re.compile(r"file:/.+"),
}
_MOST_BYTES = 2**16


@dataclass(eq=False, repr=False)
class LoggerRuns(Callback):
    """Record in ``loggers.json`` which runs the loggers write to; log the configuration and the report's path there.

    Args:
        loggers: of the Trainer, by their names in the configuration.
        run_dir: of the run.
        known: result of :func:`runs_before`.
        values: of the configuration, by key.
        report: whether a report will be written.
    """

    loggers: Mapping[str, Logger]
    run_dir: Path
    known: Mapping[str, Mapping[str, str]]
    values: Mapping[str, Any]
    report: bool

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Record the runs, which Lightning has started by now."""
        if not trainer.is_global_zero:
            return
        found = {name: run for name, logger in self.loggers.items() if (run := self._register(logger, stage))}
        if not found:
            return
        path = self.run_dir / FILE
        try:
            write_whole(path, json.dumps({**self.known, **found}, indent=1) + "\n")
        except OSError as error:
            rank_zero_warn(
                f"{path} cannot be written ({error.strerror}), so a run that resumes this one starts new runs of its "
                "loggers. Training continues. Free space on the disk."
            )

    def _register(self, logger: Logger, stage: str) -> dict[str, str] | None:
        if not isinstance(logger, (Wandb, MLFlow)) or not isinstance(logger, LenientLogger):
            return None
        logger.log_hyperparams(self.values)
        if self.report and stage == "fit":
            logger.attempt(logger.link, str((self.run_dir / _REPORT).absolute()))
        return logger.attempt(logger.identify)


def runs_before(run_dir: Path, ckpt_path: str | None) -> dict[str, dict[str, str]]:
    """Return the content of ``loggers.json`` of this run, or of the run whose checkpoint is resumed; {} without one.

    Args:
        run_dir: of this run.
        ckpt_path: the checkpoint; its run directory is its parent or grandparent.
    """
    folders = [run_dir, *([] if ckpt_path is None else Path(ckpt_path).parents[:2])]
    path = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
    if path is None:
        return {}
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("too long")
        document = json.loads(path.read_text(encoding="utf-8"))
        return {name: {key: str(value) for key, value in run.items()} for name, run in document.items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        rank_zero_warn(f"{path} cannot be read ({error}), so the loggers start new runs. Training continues.")
        return {}


def in_same_run(options: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a logger, completed with those of the earlier run where they are null.

    Args:
        options: as configured; ``id=new`` or ``run_id=new`` starts a new run.
        known: of the earlier run, see :func:`runs_before`.
    """
    if NEW in (options.get("id"), options.get("run_id")):
        return {key: None if value == NEW and key in _OPTIONS else value for key, value in options.items()}
    fitting = {key: known[key] for key, form in _OPTIONS.items() if form.fullmatch(known.get(key, ""))}
    folder = fitting.get("tracking_uri")
    if folder is not None and not Path(folder.removeprefix("file:")).is_dir():
        return dict(options)  # the store no longer exists
    return {**options, **{key: value for key, value in fitting.items() if options.get(key) is None}}
