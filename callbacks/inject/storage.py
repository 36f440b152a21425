"""Checkpoint faults: a full disk, a corrupted file."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from trainwright.callbacks.inject.fault import Fault
from trainwright.callbacks.windows import StopsWithTraining
from trainwright.checkpoint.format.manifest import read_manifest, records_of
from trainwright.checkpoint.format.records import FileRecord
from trainwright.checkpoint.store.hashed_file import HashedFile
from trainwright.checkpoint.store.paths import is_remote
from trainwright.checkpoint.store.storage import PendingFolder
from trainwright.checkpoint.store.write_errors import write_error
from trainwright.core.errors import CheckpointError


class FullDisk(StopsWithTraining, Fault):
    """See :func:`trainwright.callbacks.inject.full_disk`."""

    def __init__(self, at_step: int, rank: int | None, times: int | None) -> None:
        super().__init__(rank, at_step, times)
        self._trainer: Trainer | None = None
        self._failed: set[str] = set()  # tokens of failing saves

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Fill the disk once the step is reached."""
        self.reach(trainer)
        if self._trainer is None and self.step >= self.at_step and self.strikes(trainer) and self.has_more():
            self._trainer = trainer
            _full.append(self)
            PendingFolder.create_file = _create_file  # type: ignore[method-assign, assignment]

    def fails(self, save: str) -> bool:
        """Return whether files of the save with this token fail."""
        if save not in self._failed and self._trainer is not None and self.has_more():
            self._failed.add(save)
            self.fire(self._trainer)
        return save in self._failed

    def _stop(self) -> None:
        self._trainer = None
        _full[:] = [fault for fault in _full if fault is not self]
        if not _full:
            PendingFolder.create_file = _usual  # type: ignore[method-assign]


_full: list[FullDisk] = []
_usual: Any = PendingFolder.create_file


def _create_file(pending: PendingFolder, name: str, rank: int, size: int | None = None) -> HashedFile:
    if any(fault.fails(pending.token) for fault in _full):
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise write_error(error, os.path.join(pending.target, name), size) from error
    created: HashedFile = _usual(pending, name, rank, size)
    return created


class CorruptCheckpoint(Fault):
    """See :func:`trainwright.callbacks.inject.corrupt_checkpoint`."""

    rank: int

    def __init__(self, step: int, rank: int, times: int | None) -> None:
        super().__init__(rank, step, times)
        self._damaged: set[str] = set()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Corrupt the checkpoint if it exists."""
        self.reach(trainer)
        self._look(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Corrupt one that was written at the end of training."""
        self._look(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Corrupt one that was written in the background."""
        if stage == "fit":
            self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        if trainer.global_step < self.at_step or not self.strikes(trainer):
            return
        for callback in trainer.checkpoint_callbacks:
            newest = getattr(callback, "last_model_path", "")
            # Read again each time: a checkpoint may have the name of an earlier one.
            if newest and newest not in self._damaged and self.has_more():
                manifest = read_manifest(newest)
                if manifest.about.get("step") == self.at_step:
                    self._damaged.add(newest)
                    self.fire(trainer)
                    corrupt(newest, records_of(newest, manifest), self.rank)


def corrupt(checkpoint: str, files: list[FileRecord], rank: int) -> None:
    """Flip a bit in the middle of the largest tensor file that ``rank`` wrote.

    Raises:
        CheckpointError: if the checkpoint is not on this machine, or the rank wrote no tensor file.
    """
    if is_remote(checkpoint):
        raise CheckpointError(f"{checkpoint} is not in a folder of this machine, so no fault can be injected into it.")
    own = [record for record in files if record.rank == rank and record.name.endswith(".safetensors")]
    if not own:
        writers = sorted({record.rank for record in files if record.name.endswith(".safetensors")})
        raise CheckpointError(f"Rank {rank} wrote no tensors into {checkpoint}; name one of the ranks {writers}.")
    largest = max(own, key=lambda record: record.size)
    with (Path(checkpoint) / largest.file).open("r+b") as file:
        file.seek(largest.size // 2)
        octet = file.read(1)[0]
        file.seek(largest.size // 2)
        file.write(bytes([octet ^ 1]))
