"""Attributes of an object that are replaced for a while, or that its copies lack."""

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


class NotCopied:
    """Base class of what a strategy attaches to a module: copies of the module, and pickles, have ``None`` there."""

    def __deepcopy__(self, memo: Any) -> None:
        """Return ``None``."""

    def __reduce__(self) -> Any:
        """Pickle as ``None``."""
        return _none, ()


def _none() -> None:
    """Return ``None`` when unpickled."""
