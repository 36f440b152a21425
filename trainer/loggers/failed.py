"""Log folders of runs that fail before their first batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from trainwright.core.run.run_directory import RunDirRollback


@contextmanager
def no_logs_without_a_batch(trainer: Trainer) -> Iterator[None]:
    """Remove the log folders that this run has made, if it raises before a batch is complete.

    Args:
        trainer: of the run; only its rank 0 writes logs.
    """
    loggers: list[Any] = trainer.loggers if trainer.is_global_zero else []  # type: ignore[attr-defined]
    folders = [(each, each.log_dir) for each in loggers]
    new = [(each, RunDirRollback(Path(at))) for each, at in folders if isinstance(at, str) and not os.path.exists(at)]
    try:
        yield
    except Exception:
        loops: tuple[Any, ...] = (trainer.fit_loop.epoch_loop, trainer.validate_loop, trainer.test_loop)
        if not any(loop.batch_progress.total.completed for loop in (*loops, trainer.predict_loop)):
            for logger, folder in new:
                folder.restore()
                logger._experiment = None  # makes its folder anew if the trainer is used again
        raise
