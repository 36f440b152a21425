"""Lightning's counters of a fit, set as if the whole run had used the present layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import RunningStage

from trainwright.core.lightning_internals import _parse_num_batches
from trainwright.trainer.data.cursor import Cursor, LoaderCursor
from trainwright.trainer.data.reading import dealer_of
from trainwright.trainer.loop.epoch import LeanEpochLoop

_COUNTS = ("ready", "started", "processed", "completed")


def set_all(tracker: Any, value: int) -> None:
    """Set all counts of a tracker."""
    for name in _COUNTS:
        setattr(tracker, name, value)


def reopen(progress: Any, epoch: int) -> None:
    """Reopen an epoch, which Lightning counts as done when the run stopped in the middle of it."""
    for name in ("processed", "completed"):
        excess = max(getattr(progress.current, name) - epoch, 0)
        for tracker in (progress.current, progress.total):
            setattr(tracker, name, getattr(tracker, name) - excess)


def cursor_of_counters(
    loop: LeanEpochLoop, epoch: int, length: float, loaders: Sequence[LoaderCursor], accumulation: int, data_ranks: int
) -> Cursor:
    """Return a cursor for a checkpoint without one, from Lightning's counters under this layout.

    Args:
        loop: with the counters.
        epoch: current or next.
        length: batches of an epoch on each data rank.
        loaders: current state.
        accumulation: micro-batches per optimizer step.
        data_ranks: number of data ranks.
    """
    ready = loop.batch_progress.current.ready
    steps = ready // accumulation
    return Cursor(
        epoch=epoch,
        steps=steps,
        finished=loop.batch_progress.is_last_batch or ready >= length > 0,
        stepped=loop._batches_that_stepped,
        accumulation=accumulation,
        batches=None,
        data_ranks=data_ranks,
        loaders=tuple(replace(each, position={"samples": steps * (each.global_batch_size or 0)}) for each in loaders),
    )


def set_batches(
    loop: LeanEpochLoop, cursor: Cursor, length: float, in_place: bool, owes: bool, accumulation: int
) -> None:
    """Set the counters of the epoch loop.

    Args:
        loop: with counters of another layout.
        cursor: of the run.
        length: batches of an epoch on each data rank now.
        in_place: whether the end of the epoch is pending.
        owes: whether the end of the last batch is pending.
        accumulation: micro-batches per optimizer step now.
    """
    progress = loop.batch_progress
    before = progress.total.ready - progress.current.ready
    if before == cursor.epoch * (cursor.batches or 0) and length != float("inf"):
        before = cursor.epoch * int(length)
    else:
        before = before // cursor.accumulation * accumulation
    current = cursor.steps * accumulation
    if cursor.finished and length != float("inf"):
        current = int(length)
    set_all(progress.total, before + current)
    set_all(progress.current, 0 if cursor.finished and not in_place else current)
    progress.is_last_batch = in_place
    # The end of the batch, which counts it, is pending.
    loop._batches_that_stepped = cursor.stepped - (in_place or owes)
    loop.owes_end_of_batch = owes
    for loader in cursor.loaders:
        if "trained" in loader.position and loader.global_batch_size:
            # Leased samples: global batches of samples count, not this rank's steps.
            loop.set_steps(int(loader.position["trained"]) // loader.global_batch_size)


def measure_limits(combined: Any, limit: float) -> bool:
    """Update the limits of loaders that deal samples, and return whether any changed.

    Args:
        combined: loader of all training loaders.
        limit: ``limit_train_batches``.
    """
    limits = list(combined.limits)
    for index, loader in enumerate(combined.flattened):
        length = sized_len(loader)
        if dealer_of(loader) is not None and length is not None:
            limits[index] = _parse_num_batches(RunningStage.TRAINING, length, limit)
    changed: bool = limits != combined.limits
    combined.limits = limits
    if combined._iterator is not None:
        combined._iterator.limits = limits
    return changed
