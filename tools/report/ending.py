"""Report page of a run that has ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trainwright.core.text.printable import one_line


def write_report(run_dir: Path) -> None:
    """Write `report.html` into a run directory and print its path; print a failure instead of raising it."""
    try:
        from trainwright.tools.report.page import PAGE_FILE, write_page

        out = run_dir / PAGE_FILE
        write_page([run_dir], out)
    except Exception as error:  # a report must not change the outcome of a run
        why = one_line(str(error)) or type(error).__name__
        print(f"trainwright: no report was written: {why}", file=sys.stderr, flush=True)
        return
    relative = os.path.relpath(out)
    print(f"Report:        {out if relative.startswith('..') else relative}", flush=True)
