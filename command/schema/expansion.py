"""Expansion of `strategy=deepspeed_json strategy.path=...` into overrides."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TextIO, TypeVar

from omegaconf import DictConfig

Compose = Callable[[Sequence[str]], DictConfig | None]
CHOICE = "deepspeed_json"
ASKS = re.compile(rf"\+{{0,2}}strategy=['\"]?{CHOICE}['\"]?")
PATH = re.compile(r"\+{0,2}strategy\.path=.*", re.DOTALL)
FILE = "deepspeed_import.json"


class ImportReport(Protocol):
    """Report on the keys of a file."""

    @property
    def file(self) -> str: ...

    def summary(self) -> str: ...

    def to_text(self) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


_Report = TypeVar("_Report", bound=ImportReport)


@dataclass
class Expansion(Generic[_Report]):
    """Overrides and report of a file.

    Attributes:
        overrides: to compose: those of the file, then the typed ones.
        report: status of each key; None = the file could not be read.
        problems: one text each.
    """

    overrides: list[str]
    report: _Report | None = None
    problems: list[str] = field(default_factory=list)


def asks_for_file(overrides: Sequence[str]) -> bool:
    """Return whether overrides name a DeepSpeed JSON with its path."""
    return any(ASKS.fullmatch(text) for text in overrides) and any(PATH.fullmatch(text) for text in overrides)


def report_import(report: ImportReport | None, stream: TextIO, run_dir: Path | None = None) -> None:
    """Print the report, and store it in the run directory.

    Args:
        report: None = the run was not made from a file: nothing is printed.
        stream: to print to.
        run_dir: receives `deepspeed_import.json`; None = it is not written.
    """
    if report is None:
        return
    print(report.to_text(), file=stream, flush=True)
    if run_dir is not None:
        text = json.dumps(report.to_dict(), indent=1, allow_nan=False)
        (run_dir / FILE).write_text(text + "\n", encoding="utf-8")
