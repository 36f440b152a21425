"""Faults of checkpoints: a full disk, a file that is not what was written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from trainwright.callbacks.inject.fault import Fault
from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.manifest import read_manifest
from trainwright.checkpoint.paths import is_remote
from trainwright.checkpoint.records import FileRecord
from trainwright.checkpoint.sealed import SealedFile
from trainwright.checkpoint.storage import PendingFolder
from trainwright.checkpoint.write_errors import write_error


class FullDisk(Fault):
    """See :func:`trainwright.callbacks.inject.full_disk`."""

    def __init__(self, at_step: int, rank: int | None, times: int | None) -> None:
        super().__init__(rank, at_step, times)
        self._usual: Any = None
        self._failed: set[str] = set()  # tokens of the saves that fail

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Fill the disk, once the step is reached."""
        self.reach(trainer)
        if self._usual is None and self.step >= self.at_step and self.strikes(trainer) and self.has_more():
            self._fill(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Empty it again."""
        self._empty()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Empty it again."""
        self._empty()

    def _empty(self) -> None:
        if self._usual is not None:
            PendingFolder.create_file = self._usual  # type: ignore[method-assign]
            self._usual = None

    def _fill(self, trainer: Trainer) -> None:
        self._usual = usual = PendingFolder.create_file

        def create_file(pending: PendingFolder, name: str, rank: int, size: int | None = None) -> SealedFile:
            if pending.token not in self._failed:
                if not self.has_more():
                    return usual(pending, name, rank, size)
                self._failed.add(pending.token)
                self.fire(trainer)
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise write_error(error, os.path.join(pending.target, name), size) from error

        PendingFolder.create_file = create_file  # type: ignore[method-assign, assignment]


class CorruptCheckpoint(Fault):
    """See :func:`trainwright.callbacks.inject.corrupt_checkpoint`."""

    rank: int

    def __init__(self, step: int, rank: int, times: int | None) -> None:
        super().__init__(rank, step, times)
        self._seen = ""  # the newest checkpoint that was looked at

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Look for the checkpoint."""
        self.reach(trainer)
        self._look(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look for one that was written at the end of training."""
        self._look(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Look for one that was written in the background until now."""
        if stage == "fit":
            self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        callback: Any = getattr(trainer, "checkpoint_callback", None)
        newest = getattr(callback, "last_model_path", "")
        if not newest or newest == self._seen or not self.strikes(trainer) or not self.has_more():
            return
        self._seen = newest
        manifest = read_manifest(newest)
        if manifest.about.get("step") == self.at_step:
            self.fire(trainer)
            corrupt(newest, list(manifest.files.values()), self.rank)


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
