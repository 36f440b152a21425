"""What a rank leaves for the launching process, as small files in a folder of this machine."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

_RESULT = "result"


def write_result(folder: Path, metrics: Mapping[str, float]) -> None:
    """Write down the metrics that rank 0 has ended with."""
    write_whole(folder / _RESULT, json.dumps(dict(metrics)))


def read_result(folder: Path) -> dict[str, float]:
    """The metrics that rank 0 has ended with, by name."""
    metrics: dict[str, float] = json.loads((folder / _RESULT).read_text(encoding="utf-8"))
    return metrics


def write_whole(path: Path, text: str) -> None:
    """Write a file that others see whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
