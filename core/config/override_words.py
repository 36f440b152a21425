"""Overrides as they are typed in a command line. Imports nothing heavy."""

from collections.abc import Mapping
from typing import Any


def typed(value: Any) -> str:
    """A value as Hydra's command line takes it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{typed(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(typed(each) for each in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def in_shell(word: str) -> str:
    """An override as a shell hands it on: in quotes where it has signs of a shell's own."""
    return f"'{word}'" if any(sign in word for sign in "{}[]* ") else word
