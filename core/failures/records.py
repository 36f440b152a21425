"""What a rank leaves for the launching process, as small files in a folder of this machine.

They survive the rank: what it did last is known after it was killed too.
"""

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
class Beginning:
    """How an attempt began to train; told by rank 0.

    Attributes:
        step: optimizer steps that were done before.
        global_batch_size: samples per optimizer step; None: not known, as with batches of the user's own making.
    """

    step: int
    global_batch_size: int | None = None


class StepRecord:
    """The number of optimizer steps that a rank has done, in memory that outlives it.

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
        """Note that so many steps are done; costs a fraction of a microsecond."""
        _INTEGER.pack_into(self._memory, 0, step)


def read_steps(folder: Path) -> dict[int, int]:
    """Optimizer steps that each rank had done, by rank; ranks that did not begin to train are absent."""
    paths = {int(path.name.removeprefix(_STEP)): path for path in folder.glob(f"{_STEP}*")}
    written = {rank: path.read_bytes() for rank, path in paths.items()}
    steps = {rank: int(_INTEGER.unpack(each)[0]) for rank, each in written.items() if len(each) == _INTEGER.size}
    return {rank: step for rank, step in steps.items() if step != _NOT_BEGUN}


def write_beginning(folder: Path, beginning: Beginning) -> None:
    """Write down how the attempt begins to train."""
    write_whole(folder / _BEGINNING, json.dumps(asdict(beginning)))


def read_beginning(folder: Path) -> Beginning | None:
    """How the attempt began to train; None: it did not."""
    path = folder / _BEGINNING
    return Beginning(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def write_result(folder: Path, metrics: Mapping[str, float]) -> None:
    """Write down the metrics that rank 0 has ended with."""
    write_whole(folder / _RESULT, json.dumps(dict(metrics)))


def read_result(folder: Path) -> dict[str, float] | None:
    """The metrics that rank 0 has ended with, by name; None: the user's own code ended it, or it did not end well."""
    path = folder / _RESULT
    metrics: dict[str, float] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return metrics


def write_whole(path: Path, text: str) -> None:
    """Write a file that others see whole or not at all; each file has one writer at a time.

    The name of the partial file is fixed: one that a failing disk did not let go makes room for the next. A link under
    that name is not followed.
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
