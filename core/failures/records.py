"""Small files that a rank leaves for the launching process; they survive a killed rank."""

import json
import mmap
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_RESULT, _BEGINNING, _STEP = "result", "beginning", "step."
_INTEGER = struct.Struct("<q")
_NOT_BEGUN = -1


@dataclass(frozen=True)
class AttemptStart:
    """Start of an attempt, recorded by rank 0.

    Attributes:
        step: optimizer steps done before.
        global_batch_size: samples per optimizer step; None: unknown, as with custom batches.
    """

    step: int
    global_batch_size: int | None = None


class StepRecord:
    """Number of optimizer steps of a rank, in memory that outlives it.

    Args:
        folder: of the records.
        rank: global rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        with (folder / f"{_STEP}{rank}").open("w+b") as file:
            file.write(_INTEGER.pack(_NOT_BEGUN))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), _INTEGER.size)

    def write(self, step: int) -> None:
        """Record the number of steps done; takes a fraction of a microsecond."""
        _INTEGER.pack_into(self._memory, 0, step)


def read_steps(folder: Path) -> dict[int, int]:
    """Return the optimizer steps of each rank that has started to train."""
    paths = {int(path.name.removeprefix(_STEP)): path for path in folder.glob(f"{_STEP}*")}
    written = {rank: path.read_bytes() for rank, path in paths.items()}
    steps = {rank: int(_INTEGER.unpack(each)[0]) for rank, each in written.items() if len(each) == _INTEGER.size}
    return {rank: step for rank, step in steps.items() if step != _NOT_BEGUN}


def write_attempt_start(folder: Path, beginning: AttemptStart) -> None:
    """Record the start of an attempt."""
    write_whole(folder / _BEGINNING, json.dumps(asdict(beginning)))


def read_attempt_start(folder: Path) -> AttemptStart | None:
    """Return the start of the attempt; None: it has not started to train."""
    path = folder / _BEGINNING
    return AttemptStart(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def write_result(folder: Path, metrics: Mapping[str, float]) -> None:
    """Record the final metrics of rank 0."""
    write_whole(folder / _RESULT, json.dumps(dict(metrics)))


def read_result(folder: Path) -> dict[str, float] | None:
    """Return the final metrics of rank 0 by name; None if the user's code ended the run, or it failed."""
    path = folder / _RESULT
    metrics: dict[str, float] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return metrics


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically; each file has one writer at a time.

    The partial file has a fixed name, so that a leftover of a failing disk is replaced. Symbolic links under that name
    are not followed.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
