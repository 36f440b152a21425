"""The metrics of a pod's run, as a line of its log for the command that follows it (`launch=kubernetes`)."""

from __future__ import annotations

import json
from collections.abc import Mapping

from trainwright.core.text.bounded import parse_json
from trainwright.core.text.messages import LONGEST

MARK = "\x1e"
"""In front of a line that is for the command, and not for people."""


def metrics_line(metrics: Mapping[str, float]) -> str:
    """Return the line that says these metrics."""
    return MARK + json.dumps({name: str(value) for name, value in metrics.items()})  # JSON has no NaN


def metrics_in(line: str) -> dict[str, float] | None:
    """Return the metrics that a line says; None: it is output of a rank."""
    if not line.startswith(MARK):
        return None
    try:
        said = parse_json(line[len(MARK) :].encode(), LONGEST)
        return {name: float(value) for name, value in said.items()}
    except (AttributeError, TypeError, ValueError):
        return None
