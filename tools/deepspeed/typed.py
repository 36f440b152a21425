"""Overrides of the command line, which win over a file; and how values are typed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

# Each of these decides how a global batch is made, so a typed one replaces what a file says of the others.
_BATCH = ("global_batch_size", "accumulation", "accumulation.steps")
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")


class Typed:
    """Overrides as typed, by the native key that each one sets.

    Args:
        overrides: `key=value`, as on the command line.
    """

    def __init__(self, overrides: Sequence[str] = ()) -> None:
        self._by_key = {text.lstrip("+~").split("=", 1)[0].split("@")[0]: text for text in overrides}

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def over(self, key: str) -> str | None:
        """Return the override that takes the place of a native key: of it, or of what it is in; None if none does."""
        if key in _BATCH:
            return next((self._by_key[other] for other in _BATCH if other in self._by_key), None)
        parts = key.split(".")
        above = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
        return next((self._by_key[name] for name in above if name in self._by_key), None)

    def value(self, key: str) -> Any:
        """Return the typed value of a key; None if it was not typed, or makes no sense."""
        if key not in self._by_key:
            return None
        try:
            override = OverridesParser.create().parse_override(self._by_key[key])
        except HydraException:
            return None  # refused where the configuration is composed
        return None if override.is_sweep_override() else override.value()


def hydra_value(value: Any) -> str:
    """A plain value as Hydra's grammar wants it typed."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(hydra_value(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{hydra_value(item)}" for name, item in value.items()) + "}"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in ("null", "true", "false", "inf", "nan"):
        return text
    # Within quotes a backslash before a quote is one; Hydra's own interpolations begin with a dollar.
    escaped = re.sub(r"(\\+)(?='|$)", r"\1\1", text).replace("'", r"\'")
    return f"'{escaped}'"
