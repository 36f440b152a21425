"""Records of monitored values: emitted by callbacks that measure, consumed by callbacks with a method ``on_record``."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from trainwright.callbacks.monitor.sample import is_sampled, sampled_ranks
from trainwright.callbacks.steps import log_metrics, steps_done
from trainwright.core.config.options import number, require
from trainwright.core.text.plain import finite

FOLDER = "monitor"
"""Subfolder of the run directory."""


def emit(trainer: Any, kind: str, values: Mapping[str, Any], step: int | None = None) -> None:
    """Pass a record to ``on_record(trainer, record)`` of every callback on this rank that has it.

    A record holds ``time`` (unix seconds), ``step`` (optimizer steps done), ``kind`` and the values of that kind.

    Args:
        trainer: of the run.
        kind: see docs/monitoring.md.
        values: plain values (numbers, strings, lists and mappings of them).
        step: optimizer steps done; ``None``: the Trainer's current count.
    """
    done = steps_done(trainer) if step is None else step
    record = {"time": time.time(), "step": int(done), "kind": kind, **values}
    for callback in trainer.callbacks:
        if hasattr(callback, "on_record"):
            callback.on_record(trainer, record)


def publish(trainer: Any, step: int, kind: str, values: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Emit the values of the optimizer step numbered ``step`` as a record, and log metrics of them."""
    emit(trainer, kind, values, step + 1)
    log_metrics(trainer, metrics, step)


def records_path(run_dir: str | Path, rank: int) -> Path:
    """Return the path of a rank's records."""
    return Path(run_dir) / FOLDER / f"rank_{rank}.jsonl"


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file in order, without an unfinished last line; none if there is no file."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record


class MonitorFile(Callback):
    """Keep the records of each rank in ``<run_dir>/monitor/rank_<n>.jsonl``, one JSON object per line.

    Lines are written at the end of the micro-batch that emitted them, and survive a killed process. A resumed run
    appends to the file. Should be the last of the monitoring callbacks, else lines are written a micro-batch later.

    Args:
        run_dir: of the run; ``None``: off.
        most_ranks: maximum number of ranks with a file, chosen by
            :func:`~trainwright.callbacks.monitor.sample.is_sampled`; ``None``: all ranks.

    Raises:
        ValueError: if ``most_ranks`` is less than 1.
    """

    # The strategy may still be receiving the weights of this step.
    looks_at_parameters = False

    def __init__(self, run_dir: str | None = None, most_ranks: int | None = 1024) -> None:
        require(self, int | None, number(None, least=1, null="for all ranks"), most_ranks=most_ranks)
        self.run_dir = run_dir
        self.most_ranks = most_ranks
        self._lines: list[str] = []
        self._file: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open the file of a sampled rank."""
        if stage != "fit" or self.run_dir is None or self._file is not None:
            return
        if self.most_ranks is not None and trainer.world_size > self.most_ranks:
            rank_zero_info(
                f"MonitorFile: of {trainer.world_size} ranks {len(sampled_ranks(trainer.world_size, self.most_ranks))} "
                f"keep records in {records_path(self.run_dir, 0).parent}; with monitor.file.most_ranks=null all do."
            )
        if is_sampled(trainer.global_rank, trainer.world_size, self.most_ranks):
            try:
                self._file = _open_records(records_path(self.run_dir, trainer.global_rank))
            except OSError as error:
                self._give_up(error)

    def on_record(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        """Keep a record."""
        if self._file is not None:
            self._lines.append(json.dumps(finite(record), separators=(",", ":")) + "\n")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Write pending lines."""
        if self._lines:
            self.flush()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write pending lines: the process may be about to end."""
        self.flush()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write pending lines and close the file."""
        self.flush()
        self._close()

    def flush(self) -> None:
        """Write pending lines."""
        text, self._lines = "".join(self._lines).encode(), []
        try:
            while text and self._file is not None:
                text = text[os.write(self._file, text) :]
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._close()
        warnings.warn(
            f"records of {self.run_dir}/monitor cannot be written ({error.strerror}), so report and watch show nothing "
            "of this rank from now on; training continues. Free space on the disk.",
            RuntimeWarning,
            stacklevel=3,
        )

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # on a failing disk
                os.close(file)


def _open_records(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    # A power loss may have left part of a line.
    size = whole = os.fstat(file).st_size
    while whole and os.pread(file, 1, whole - 1) != b"\n":
        whole -= 1
    if whole != size:
        os.truncate(file, whole)
    return file
