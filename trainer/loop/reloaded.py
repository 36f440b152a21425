"""Loaders of a resumed run that the saved run had made in an earlier epoch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch


def made_in_epoch(epoch: float | None, source: Any, trainer: Any) -> AbstractContextManager[Any]:
    """Return a context in which ``trainer.current_epoch`` is ``epoch`` while the user's code makes loaders.

    Args:
        epoch: in which loaders were last reloaded; ``None``: now.
        source: Lightning's source of loaders, which calls the user's code.
        trainer: the Trainer.
    """
    make, progress = source.dataloader, trainer.fit_loop.epoch_progress.current

    def dataloader() -> Any:
        with patch.object(progress, "completed", epoch):
            return make()

    return nullcontext() if epoch is None else patch.object(source, "dataloader", dataloader)
