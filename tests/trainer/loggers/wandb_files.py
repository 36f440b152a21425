"""Reader of offline wandb runs, with wandb's own messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 2**15, 7


class OfflineRun:
    """One ``.wandb`` file.

    Args:
        folder: of the offline run.

    Attributes:
        id: of the run.
        rows: values logged, in order.
        config: by key.
        summary: by key.
        exit_code: with which it was finished; None: it was not.
    """

    def __init__(self, folder: Path) -> None:
        [file] = folder.glob("*.wandb")
        self.id, self.rows, self.config, self.summary = "", [], {}, {}
        self.exit_code: int | None = None
        for record in _records(file.read_bytes()):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.id = record.run.run_id
                self.config |= _values(record.run.config.update)
            elif kind == "config":
                self.config |= _values(record.config.update)
            elif kind == "summary":
                self.summary |= _values(record.summary.update)
            elif kind == "history":
                self.rows.append(_values(record.history.item))
            elif kind == "exit":
                self.exit_code = record.exit.exit_code

    def losses(self) -> dict[int, float]:
        """Return the last logged loss of each step."""
        return {row["trainer/global_step"]: row["loss"] for row in self.rows if "loss" in row}


def offline_runs(run_dir: Path) -> list[OfflineRun]:
    """Return the offline runs of a run directory, oldest first."""
    return [OfflineRun(folder) for folder in sorted((run_dir / "wandb").glob("offline-run-*"))]


def _values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[Any]:
    """Yield the records of a LevelDB log: blocks of 32 KiB with fragments of checksum, length and kind."""
    from wandb.proto import wandb_internal_pb2

    at, whole = HEADER, b""  # after the file header
    while at + HEADER <= len(data):
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if BLOCK - at % BLOCK < HEADER or kind == 0:
            at += BLOCK - at % BLOCK
            continue
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # a whole record, or its last fragment
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""
