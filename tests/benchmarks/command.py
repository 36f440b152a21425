"""Benchmarks run as commands."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.pool import ROOT
from tests.warm import warm_run


def result_of(*words: str) -> dict[str, Any]:
    """Return the last line that ``python WORDS`` prints, which is JSON, and all that it printed as ``printed``."""
    ended = warm_run([sys.executable, *words], cwd=ROOT, capture_output=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return {**json.loads(ended.stdout.splitlines()[-1]), "printed": ended.stdout + ended.stderr}
