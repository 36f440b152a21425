"""The page that is written when a run ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trainwright.core.text.printable import one_line


def write_report(run_dir: Path) -> None:
    """Write `report.html` into a run directory and say where it is. It never fails a run: what goes wrong is said."""
    try:
        from trainwright.tools.report.page import PAGE_FILE, write_page

        out = run_dir / PAGE_FILE
        write_page([run_dir], out)
    except Exception as error:  # whatever it is, the run has ended as it has
        why = one_line(str(error)) or type(error).__name__
        print(f"trainwright: no report was written: {why}", file=sys.stderr, flush=True)
        return
    relative = os.path.relpath(out)
    print(f"Report:        {out if relative.startswith('..') else relative}", flush=True)
