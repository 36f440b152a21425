"""The words of ``communication``, and which of them are refused; without torch, for the command line."""

from __future__ import annotations

import difflib
from typing import Any

OFF = "none"
WORDS = (OFF, "advise", "auto")


def communication_problems(communication: Any) -> list[str]:
    """What is wrong with a choice of ``communication``; empty when nothing is."""
    if communication in WORDS:
        return []
    near = difflib.get_close_matches(str(communication), WORDS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return [f"strategy.communication={communication}: unknown.{hint} Allowed: {', '.join(WORDS)}."]


def chosen_already(communication: str) -> str:
    """What to say where replicas step by themselves."""
    return (
        f"strategy.communication={communication} with local updates: it compares ways to average gradients at every "
        "step, and these replicas do not; leave it out, or measure with strategy=ddp (or zero1, zero2, zero3, hybrid)"
    )
