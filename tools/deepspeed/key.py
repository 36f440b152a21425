"""One key of DeepSpeed's configuration that is mapped to an option, or that stops a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAPPED, APPROXIMATED, UNSUPPORTED = "mapped", "approximated", "unsupported"
STATUSES = (MAPPED, APPROXIMATED, UNSUPPORTED)
AUTO = "auto"

BOOL, WHOLE, NUMBER, TEXT, LIST, MAPPING, ANY = "bool", "whole", "number", "text", "list", "mapping", "any"
RATES = "rates"  # a number, or a list with one for each parameter group
KINDS = {
    BOOL: "true or false",
    WHOLE: "a whole number",
    NUMBER: "a number",
    TEXT: "text",
    LIST: "a list",
    MAPPING: "a mapping",
    ANY: "any value",
    RATES: "a number, or a list of numbers",
}


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        path: dotted path in the file.
        kind: type of its value, see `KINDS`.
        becomes: native key that takes its value; empty = other code decides.
        note: how the native configuration differs, or why a run is refused and what to do instead.
        status: mapped, approximated or, for a key that stops a run, unsupported.
        words: allowed values; empty = any of the kind.
        auto: whether "auto" is allowed.
        least: smallest value; None = any.
        sets: native key and value that follow where the value is true, not 0 and not empty; None = other code decides.
        harmless: for a key that stops a run, the value with which it does not.
    """

    path: str
    kind: str
    becomes: str = ""
    note: str = ""
    status: str = MAPPED
    words: tuple[Any, ...] = ()
    auto: bool = False
    least: int | None = None
    sets: tuple[str, Any] | None = None
    harmless: Any = False


def alike(section: str, kind: str, names: str, **common: Any) -> tuple[Key, ...]:
    """Return keys that differ in nothing but their names.

    Args:
        section: path of the section that they are in; empty = the file.
        kind: of their values.
        names: separated by spaces.
        **common: other fields of :class:`Key`.
    """
    return tuple(Key(f"{section}.{name}".lstrip("."), kind, **common) for name in names.split())


def stop(path: str, note: str, kind: str = BOOL, harmless: Any = False, words: tuple[Any, ...] = ()) -> Key:
    """Return a key that stops a run, except with its harmless value."""
    return Key(path, kind, "", note, UNSUPPORTED, words, harmless=harmless)
