"""Loaders of a resumed run that the saved run had made in an earlier epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def made_in_epoch(epoch: float | None, source: Any, trainer: Any) -> Iterator[None]:
    """Let ``trainer.current_epoch`` be ``epoch`` while the user's code makes loaders in a ``with`` block.

    Args:
        epoch: in which loaders were last reloaded; ``None``: now.
        source: Lightning's source of loaders, which calls the user's code.
        trainer: the Trainer.
    """
    if epoch is None:
        yield
        return

    def dataloader() -> Any:
        progress = trainer.fit_loop.epoch_progress.current
        now, progress.completed = progress.completed, epoch
        try:
            return type(source).dataloader(source)
        finally:
            progress.completed = now

    source.dataloader = dataloader
    try:
        yield
    finally:
        del source.dataloader
