"""What a key of DeepSpeed's configuration is, and what becomes of it here.

The tables of all keys (`table.py` joins them) follow DeepSpeed's documentation, "DeepSpeed Configuration JSON", and the
models that DeepSpeed 0.19 reads a file with; keys that later versions dropped are kept, since files have them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
        path: dotted; a star stands for a name that the user chooses.
        kind: what its value is, see `KINDS`.
        status: what becomes of it, unless the value or the rest of the file decides otherwise.
        becomes: the native configuration; empty if there is none.
        note: how the native configuration differs, or why there is none and what to do instead.
        words: allowed values; empty = any of the kind.
        harmless: values for which nothing needs to be done, whatever `status` says.
        auto: what "auto" is taken from; empty = "auto" is refused.
        stops: the key changes what is trained and cannot be had, so that a run from the file is refused.
        switch: path of a key that must be true for this one to have an effect; empty = always.
        secret: its value is never shown.
    """

    path: str
    kind: str
    status: str
    becomes: str = ""
    note: str = ""
    words: tuple[Any, ...] = ()
    harmless: tuple[Any, ...] = ()
    auto: str = ""
    stops: bool = False
    switch: str = ""
    secret: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The path, taken apart."""
        return tuple(self.path.split("."))


def within(section: str, *keys: Key, switch: str = "") -> tuple[Key, ...]:
    """Keys of a section, whose own paths are relative to it.

    Args:
        section: path of the section.
        switch: key of the section that turns it on (its path relative to the section); empty = it is always on.
    """
    turn = f"{section}.{switch}" if switch else ""
    return tuple(
        replace(
            key,
            path=f"{section}.{key.path}",
            switch=f"{section}.{key.switch}" if key.switch else "" if key.path == switch else turn,
        )
        for key in keys
    )


def alike(status: str, note: str, becomes: str = "", **kinds: str) -> tuple[Key, ...]:
    """Keys of which the same is to be said: name -> kind."""
    return tuple(Key(name, kind, status, becomes, note) for name, kind in kinds.items())
