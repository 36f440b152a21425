"""Telling at the start of a run what became of the DeepSpeed JSON that it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

from trainwright.tools.deepspeed.report import Report

FILE = "deepspeed_import.json"


def tell_import(report: Report | None, stream: TextIO, run_dir: Path | None = None) -> None:
    """Print the report, and keep it in the run directory.

    Args:
        report: None = the run was not made from a file: nothing is said.
        stream: where to print.
        run_dir: it is written there as `deepspeed_import.json`; None = nowhere.
    """
    if report is None:
        return
    print(report.to_text(), file=stream, flush=True)
    if run_dir is not None:
        text = json.dumps(report.to_dict(), indent=1, allow_nan=False)
        (run_dir / FILE).write_text(text + "\n", encoding="utf-8")
