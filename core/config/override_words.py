"""Formatting of Hydra overrides. Imports nothing heavy."""

import re
from collections.abc import Mapping
from typing import Any

# Text that needs no quotes in Hydra's grammar.
_PLAIN = re.compile(r"[A-Za-z_*][\w./*-]*")
_WORDS = ("null", "true", "false", "inf", "nan")


def typed(value: Any) -> str:
    """Return a plain value in Hydra's override syntax, which parses back to the same value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{typed(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(typed(each) for each in value) + "]"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    escaped = re.sub(r"(\\+)(?='|$)", r"\1\1", text).replace("'", r"\'")
    return f"'{escaped}'"
