"""A loader around a loader that looks like it."""

from __future__ import annotations

from typing import Any


class WrappedLoader:
    """A loader that forwards what it does not define to another one.

    Args:
        loader: the wrapped loader.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        # Attributes that others read: batch_size, dataset, num_workers, state_dict, ...
        if name in ("loader", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def _iterator(self) -> Any:
        return getattr(self.loader, "_iterator", None)

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        # Lightning drops a loader's iterator after stopping its workers. Kept by the wrapped loader, it would be
        # reused, and wait for persistent workers that are gone.
        if hasattr(self.loader, "_iterator"):
            self.loader._iterator = iterator


def innermost(loader: Any) -> Any:
    """Return the innermost wrapped loader."""
    while isinstance(loader, WrappedLoader):
        loader = loader.loader
    return loader
