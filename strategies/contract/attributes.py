"""Attributes of an object that are replaced for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def with_attributes(target: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of an object in a ``with`` block."""
    held = vars(target)
    before = {name: held[name] for name in values if name in held}
    held.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():
            held.pop(name, None)
        held.update(before)
